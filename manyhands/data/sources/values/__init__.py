# SPDX-License-Identifier: Apache-2.0
"""Text and JSON as typed values."""
