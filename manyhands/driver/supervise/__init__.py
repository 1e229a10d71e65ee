# SPDX-License-Identifier: Apache-2.0
"""Who is in, who is gone and why: decisions, and what they are made from."""
