# SPDX-License-Identifier: Apache-2.0
"""What people ask for, one file each, readable as prose."""
