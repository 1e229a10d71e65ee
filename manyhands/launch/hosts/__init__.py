# SPDX-License-Identifier: Apache-2.0
"""Workers on several hosts: where hosts join, and the daemon on each of them."""
