# SPDX-License-Identifier: Apache-2.0
"""Hosts and tasks that a Ray cluster brings."""
