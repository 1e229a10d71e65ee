# SPDX-License-Identifier: Apache-2.0
"""The state of a replica as flat vectors, and how it outlives a worker."""
