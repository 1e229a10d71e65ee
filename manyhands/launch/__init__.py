# SPDX-License-Identifier: Apache-2.0
"""Plan → live workers: launchers, host agent, control channel, membership, supervisor."""
