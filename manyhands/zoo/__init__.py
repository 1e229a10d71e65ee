# SPDX-License-Identifier: Apache-2.0
"""Ready tasks."""
