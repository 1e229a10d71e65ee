# SPDX-License-Identifier: Apache-2.0
"""Prepared folders: the manifest and the shard files it lists."""
