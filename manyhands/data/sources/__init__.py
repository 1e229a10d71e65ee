# SPDX-License-Identifier: Apache-2.0
"""Raw files → Arrow pieces, with every bad record named."""
