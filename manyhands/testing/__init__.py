# SPDX-License-Identifier: Apache-2.0
"""Contracts and planned faults: for us and for people who extend manyhands."""
