# SPDX-License-Identifier: Apache-2.0
"""Live workers on this host: forked processes, or a thread of this one."""
