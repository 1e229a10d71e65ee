# SPDX-License-Identifier: Apache-2.0
"""The process that owns a run: it plans, supervises, keeps the books, serves files."""
