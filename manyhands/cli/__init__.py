# SPDX-License-Identifier: Apache-2.0
"""The command line: one short function per command, the same words as in Python."""
