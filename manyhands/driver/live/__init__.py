# SPDX-License-Identifier: Apache-2.0
"""What people ask of a run while it goes on."""
