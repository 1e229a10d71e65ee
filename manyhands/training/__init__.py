# SPDX-License-Identifier: Apache-2.0
"""Micro-batches → better weights: the loop, flat vectors, seeds, optimizers."""
