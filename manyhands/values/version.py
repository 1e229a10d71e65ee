# SPDX-License-Identifier: Apache-2.0
"""The version, in one place; pyproject.toml says the same and a test compares them."""

VERSION = "0.1.0"
