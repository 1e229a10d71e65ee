# SPDX-License-Identifier: Apache-2.0
"""Does a column by itself say what the label is? Looked for in a sample of the records.

The sample is of those different records whose contents have the smallest hashes: which they are
does not depend on how records are cut in pieces, and pieces are joined by taking the smallest of
all (`joined`). What is looked for, and no more:

- every value goes with one label (a code of the label, a column made from it);
- in the order of a column's numbers, each label has a stretch of its own (a score and its grade);
- a column's numbers rise, or fall, with those of the label (the label in another unit).

A column of which this is so by chance is not named: the chance of it, were labels dealt at random,
is less than `CHANCE`. So columns whose values hardly ever repeat (ids) are no false alarm.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from manyhands.data.columns.arrays import is_number, nulls, numbers, whole
from manyhands.data.columns.hashing import NULL, Hashes, hash_values

MOST_RECORDS, LEAST_RECORDS = 4096, 256
MOST_VALUES = 1 << 20
"""Of a sample, in all columns; with very many columns fewer records are looked at."""
CHANCE = math.log(1e-9)
_FEW_LABELS = 0.1
"""Of the records: more different labels than this are numbers, not classes."""

_Columns = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LabelSample:
    """Some records, in the order of their contents' hashes."""

    contents: Hashes
    labels: Hashes
    label_numbers: _Columns
    """NaN where the label is no number."""
    codes: NDArray[np.uint64]
    """A row for each column: hashes of its values."""
    numbers: _Columns
    """A row for each column: NaN where it holds no number."""

    def dump(self) -> dict[str, Any]:
        """Arrays by name, none of objects."""
        return {name: getattr(self, name) for name in self.__slots__}


def records_for(columns: int) -> int:
    return max(LEAST_RECORDS, min(MOST_RECORDS, MOST_VALUES // max(1, columns)))


def sample_of(table: pa.Table, contents: Hashes, label: str, columns: Sequence[str]) -> LabelSample:
    """The records of a table that a sample of all records could have in it."""
    labels = hash_values(table.column(label))
    known = np.flatnonzero(labels != NULL)
    _, first = np.unique(contents[known], return_index=True)
    rows = known[first[: records_for(len(columns))]]
    some = table.select([label, *columns]).take(pa.array(rows))
    return LabelSample(
        contents[rows],
        labels[rows],
        _numbers(some.column(0)),
        np.array([hash_values(c) for c in some.columns[1:]], np.uint64).reshape(-1, len(rows)),
        np.array([_numbers(c) for c in some.columns[1:]], np.float64).reshape(-1, len(rows)),
    )


def _numbers(column: pa.ChunkedArray) -> _Columns:
    kind = column.type
    if not (is_number(kind) or pa.types.is_timestamp(kind)):
        return np.full(len(column), np.nan)
    values = whole(column)
    return np.where(nulls(values), np.nan, numbers(values).astype(np.float64))


def joined(a: LabelSample, b: LabelSample) -> LabelSample:
    """The sample of both."""
    contents = np.concatenate([a.contents, b.contents])
    _, rows = np.unique(contents, return_index=True)
    rows = rows[: records_for(len(a.codes))]
    return LabelSample(
        contents[rows],
        np.concatenate([a.labels, b.labels])[rows],
        np.concatenate([a.label_numbers, b.label_numbers])[rows],
        np.concatenate([a.codes, b.codes], axis=1)[:, rows],
        np.concatenate([a.numbers, b.numbers], axis=1)[:, rows],
    )


def determining(sample: LabelSample, columns: Sequence[str]) -> Mapping[str, str]:
    """By column that determines the label: in which way."""
    found: dict[str, str] = {}
    _, labels = np.unique(sample.labels, return_inverse=True)
    for name, codes, values in zip(columns, sample.codes, sample.numbers, strict=True):
        if _one_label_each(codes, labels):
            found[name] = "each of its values goes with one label"
        elif _one_stretch_each(values, labels):
            found[name] = "each label has a range of its numbers to itself"
        elif _moves_with(values, sample.label_numbers):
            found[name] = "its numbers are in the order of the label's"
    return found


def _one_label_each(codes: Hashes, labels: NDArray[np.int64]) -> bool:
    values, which, counts = np.unique(codes, return_inverse=True, return_counts=True)
    least = np.full(len(values), len(labels), np.int64)
    most = np.full(len(values), -1, np.int64)
    np.minimum.at(least, which, labels)
    np.maximum.at(most, which, labels)
    if not (least == most).all():
        return False
    share = np.bincount(labels) / max(1, len(labels))
    sizes, often = np.unique(counts, return_counts=True)
    chances = [math.log(float((share**n).sum()) or 1e-300) for n in sizes.tolist()]
    return sum(c * n for c, n in zip(chances, often.tolist(), strict=True)) < CHANCE


def _one_stretch_each(values: _Columns, labels: NDArray[np.int64]) -> bool:
    counts = np.bincount(labels)
    if np.isnan(values).any() or not 1 < len(counts) <= _FEW_LABELS * len(labels):
        return False
    order = np.lexsort((labels, values))
    ranked, ordered = labels[order], values[order]
    change = ranked[1:] != ranked[:-1]
    if change.sum() != len(counts) - 1 or (ordered[1:][change] == ordered[:-1][change]).any():
        return False
    ways = math.lgamma(len(labels) + 1) - sum(math.lgamma(n + 1) for n in counts.tolist())
    return math.lgamma(len(counts) + 1) - ways < CHANCE


def _moves_with(values: _Columns, label: _Columns) -> bool:
    if np.isnan(values).any() or np.isnan(label).any():
        return False
    steps = np.diff(label[np.argsort(values, kind="stable")])
    distinct = len(np.unique(values)) == len(values) == len(np.unique(label))
    return distinct and bool((steps > 0).all() or (steps < 0).all()) and _is_no_chance(len(label))


def _is_no_chance(records: int) -> bool:
    return math.log(2) - math.lgamma(records + 1) < CHANCE
