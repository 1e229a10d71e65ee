# SPDX-License-Identifier: Apache-2.0
"""One micro-batch, forward and backward, with its seeds."""
