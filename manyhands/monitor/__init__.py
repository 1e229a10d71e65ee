# SPDX-License-Identifier: Apache-2.0
"""Events → what a person wants to see."""
