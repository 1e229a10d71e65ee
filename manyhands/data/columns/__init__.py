# SPDX-License-Identifier: Apache-2.0
"""Arrow columns: their types, their values as arrays, their hashes."""
