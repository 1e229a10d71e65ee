# SPDX-License-Identifier: Apache-2.0
"""Prepared data, columns or a Dataset → micro-batches in order."""
