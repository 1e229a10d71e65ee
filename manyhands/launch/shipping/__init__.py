# SPDX-License-Identifier: Apache-2.0
"""What travels to workers: the task, and files that it needs."""
