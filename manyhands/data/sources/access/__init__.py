# SPDX-License-Identifier: Apache-2.0
"""Bytes of raw files, wherever and however compressed they are."""
