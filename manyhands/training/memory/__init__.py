# SPDX-License-Identifier: Apache-2.0
"""Memory that outlives a worker."""
