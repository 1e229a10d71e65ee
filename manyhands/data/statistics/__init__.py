# SPDX-License-Identifier: Apache-2.0
"""Facts of columns from one pass, mergeable, in an order that cannot matter."""
