# SPDX-License-Identifier: Apache-2.0
"""Raw records → shards: stage, split, fit, apply, shuffle."""
