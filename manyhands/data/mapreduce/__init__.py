# SPDX-License-Identifier: Apache-2.0
"""Tasks over any executor, the external shuffle, and map_reduce on top of them."""
