# SPDX-License-Identifier: Apache-2.0
"""A deadline or a wished speed, and how many workers that takes."""
