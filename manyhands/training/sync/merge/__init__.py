# SPDX-License-Identifier: Apache-2.0
"""Servers that merge what workers push who are at different steps."""
