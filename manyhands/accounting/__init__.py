# SPDX-License-Identifier: Apache-2.0
"""Who computes what, and the proof that all of it was computed once."""
