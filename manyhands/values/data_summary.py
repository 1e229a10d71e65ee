# SPDX-License-Identifier: Apache-2.0
"""What a prepared folder holds, as plain values: data finds it, pages show it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class SplitSummary:
    name: str
    records: int
    nbytes: int
    shards: int


@dataclass(frozen=True, slots=True)
class ColumnSummary:
    name: str
    role: str
    raw: str
    """The type of the raw column."""
    encoded: str
    """How it is encoded, and as what type."""
    statistics: Mapping[str, Any]
    """Of the raw column, as manifests have them."""


@dataclass(frozen=True, slots=True)
class LeakageSummary:
    splits: tuple[str, ...]
    shared: Mapping[str, int]
    """Distinct ids, contents and groups that are in more than one split."""
    labels: Mapping[str, tuple[int, ...]]
    """By label: how many records in each split."""
    advice: str
    """What to do about what is shared; nothing when nothing is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSummary:
    folder: str
    """Without secrets."""
    format: str
    split: str
    """The rule, as it was given."""
    seed: int
    folds: int
    """More than 0: the folder holds so many folds, and no records of its own."""
    raw_records: int
    skipped: int
    notes: tuple[str, ...]
    """What was said while it was prepared."""
    hints: tuple[str, ...]
    """What people may want to mend."""
    leakage: LeakageSummary
    splits: tuple[SplitSummary, ...]
    columns: tuple[ColumnSummary, ...]
    """Raw ones."""
    encoded_columns: tuple[str, ...]
