# SPDX-License-Identifier: Apache-2.0
"""Model + held-out data → scores."""
