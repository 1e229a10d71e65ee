# SPDX-License-Identifier: Apache-2.0
"""Which host keeps which shards, and how they get there."""
