# SPDX-License-Identifier: Apache-2.0
"""Raw records → micro-batches."""
