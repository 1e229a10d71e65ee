# SPDX-License-Identifier: Apache-2.0
"""Processes that fetch and collate micro-batches ahead of their worker."""
