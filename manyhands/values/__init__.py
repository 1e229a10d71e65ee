# SPDX-License-Identifier: Apache-2.0
"""Plain values that everybody speaks: no processes, no sockets, no torch."""
