# SPDX-License-Identifier: Apache-2.0
"""How a source is cut into chunks that any process can read."""
