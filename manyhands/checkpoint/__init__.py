# SPDX-License-Identifier: Apache-2.0
"""State ↔ committed steps, any number of workers."""
