# SPDX-License-Identifier: Apache-2.0
"""Which split a record belongs to, and the proof that nothing leaks."""
