# SPDX-License-Identifier: Apache-2.0
"""Every worker sums its part; all agree on one canonical sum."""
