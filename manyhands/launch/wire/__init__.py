# SPDX-License-Identifier: Apache-2.0
"""The control channel between supervisor and workers, its long messages and heartbeats."""
