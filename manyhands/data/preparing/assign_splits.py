# SPDX-License-Identifier: Apache-2.0
"""Dividing: which split every staged record belongs to, and the proof that nothing leaks.

A record's split is a pure function of the record (`split_rule.assign`), so it does not matter who
computes it. Two things need a look at all records at once. They are done by map and reduce over
partitions of 64-bit hashes, so that memory stays bounded:

- **links**: records of one id with different keys must land on one side too. Pairs of (id, key)
  are partitioned by id; an id with several keys links them (`linked_records`).
- **leakage**: ids, contents and groups that are in more than one split. Counted after the fact,
  from what was assigned, so that the report does not believe the rule.

Beside it, columns that by themselves say what the label is are looked for (`determined_label`).
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from manyhands.data.columns.arrays import compute
from manyhands.data.columns.hashing import Hashes, hash_rows, near
from manyhands.data.columns.schema import ID
from manyhands.data.mapreduce.external_shuffle import bucket_of
from manyhands.data.sources.staging import read_piece
from manyhands.data.splitting.determined_label import (
    LabelSample,
    determining,
    joined,
    sample_of,
)
from manyhands.data.splitting.leakage import LeakageReport, shared
from manyhands.data.splitting.linked_records import KeyLinks, linked, linking
from manyhands.data.splitting.split_rule import NOWHERE, SplitRule, assign, instants, keys
from manyhands.data.statistics.exact_quantiles import Quantile
from manyhands.values.run_folder import write_whole

MOST_LABELS = 1000
"""With more different labels than this, they are numbers and are not counted."""

KINDS = ("ids", "contents", "groups")

_ENTRY = np.dtype([("kind", "u1"), ("hash", "<u8"), ("split", "i1")])
_PAIR = np.dtype([("id", "<u8"), ("key", "<u8")])


class Names(msgspec.Struct, frozen=True):
    """The columns by which records are told apart."""

    id: str = ""
    group: str = ""
    label: str = ""
    inputs: tuple[str, ...] = ()
    """What a model will learn the label from."""


class Divided(msgspec.Struct, frozen=True):
    rows: list[int]
    """Of each split."""
    nbytes: list[int]
    labels: list[dict[str, int]]
    nowhere: list[int]
    """Ids of records that the rule cannot place."""


class Counted(msgspec.Struct, frozen=True):
    counts: bytes


class Leaks(msgspec.Struct, frozen=True):
    counts: list[int]
    """In the order of KINDS."""


@dataclass(frozen=True, slots=True)
class Division:
    """How all records are divided."""

    rule: SplitRule
    stems: list[str]
    """Of each piece: where its rows' splits are."""
    pieces: list[Divided]
    report: LeakageReport
    names: Names
    notes: list[str]
    """What people should know of the label."""


def contents(table: pa.Table, names: Names) -> Hashes:
    """Of each row: a hash of everything but the record's name."""
    return hash_rows(table, [c for c in table.column_names if c not in (ID, names.id)])


# ---- links between records, and the moments of a split by time


def pair(
    piece: str, types: Mapping[str, str], names: Names, rule: SplitRule, parts: int, stem: str
) -> None:
    """(id, key) of each row, in partitions by id."""
    table = read_piece(Path(piece), types)
    pairs = np.empty(table.num_rows, dtype=_PAIR)
    pairs["id"] = near(table.column(names.id))
    pairs["key"] = keys(rule, table, contents(table, names))
    _save_parts(stem, pairs, pairs["id"], parts)


def link(stems: Sequence[str], part: int, to: str) -> None:
    """The pairs that matter: those whose id has more than one key."""
    pairs = np.concatenate([_load_part(stem, part) for stem in stems])
    ids, found = linking(pairs["id"], pairs["key"])
    _save(to, np.stack([ids, found]))


def join_links(files: Sequence[str], to: Path) -> None:
    """The table that `assign` looks keys up in, from the pairs of all partitions."""
    ids, found = np.concatenate([np.load(file) for file in files], axis=1)
    write_whole(to, linked(ids, found).dump())


def count_times(
    piece: str, types: Mapping[str, str], rule: SplitRule, quantile: Quantile
) -> Counted:
    """What a round of the search for the moments asks of one piece."""
    table = read_piece(Path(piece), {rule.column: types[rule.column]})
    return Counted(quantile.partial(instants(rule, table)))


# ---- every record's split


def divide(
    piece: str,
    types: Mapping[str, str],
    names: Names,
    rule: SplitRule,
    links: str,
    parts: int,
    stem: str,
) -> Divided:
    """Writes `stem`.npy, one int8 for each row, and what the search for leaks reads."""
    table = read_piece(Path(piece), types)
    hashes = contents(table, names)
    splits = assign(rule, table, hashes, KeyLinks.load(Path(links)) if links else None)
    _save(f"{stem}.npy", splits)
    told_apart = [
        near(table.column(names.id)) if names.id else None,
        hashes,
        near(table.column(names.group)) if names.group else None,
    ]
    entries = np.concatenate(
        [_entries(k, found, splits) for k, found in enumerate(told_apart) if found is not None]
    )
    _save_parts(stem, entries, entries["hash"], parts)
    if names.label and names.inputs:
        _save_sample(stem, sample_of(table, hashes, names.label, names.inputs))
    count = len(rule.names)
    placed = splits[splits != NOWHERE]
    rows: list[int] = np.bincount(placed, minlength=count).tolist()
    size = table.nbytes / max(1, table.num_rows)
    nowhere = table.column(ID).to_numpy()[splits == NOWHERE]
    return Divided(
        rows,
        [round(size * n) for n in rows],
        _labels(table, names.label, splits, count),
        nowhere.tolist(),
    )


def _entries(kind: int, hashes: NDArray[np.uint64], splits: NDArray[np.int8]) -> NDArray[Any]:
    """Without repetition: a hash and a split are written once for each piece."""
    entries = np.empty(len(hashes), dtype=_ENTRY)
    entries["kind"], entries["hash"], entries["split"] = kind, hashes, splits
    return np.unique(entries)


def _labels(
    table: pa.Table, label: str, splits: NDArray[np.int8], count: int
) -> list[dict[str, int]]:
    """How many records of each label, for each split; nothing where labels are numbers."""
    if not label or pa.types.is_floating(table.column(label).type):
        return [{}] * count
    counted: list[dict[str, int]] = []
    for k in range(count):
        chosen = table.column(label).filter(pa.array(splits == k))
        found = compute.value_counts(chosen).to_pylist()
        if len(found) > MOST_LABELS:
            return [{}] * count
        named = sorted((str(f["values"]), int(f["counts"])) for f in found)
        counted.append(dict(named))
    return counted


def leaks(stems: Sequence[str], part: int) -> Leaks:
    """Of one partition: how many ids, contents and groups are in more than one split."""
    entries = np.concatenate([_load_part(stem, part) for stem in stems])
    entries = entries[entries["split"] != NOWHERE]
    of_kind = [entries[entries["kind"] == k] for k in range(len(KINDS))]
    return Leaks([shared(found["hash"], found["split"]) for found in of_kind])


def determined_by(stems: Sequence[str], names: Names) -> tuple[Mapping[str, str], int]:
    """The columns that determine the label, in which way, and in how many records."""
    sample = reduce(joined, map(_load_sample, stems))
    return determining(sample, names.inputs), len(sample.labels)


def _save_sample(stem: str, sample: LabelSample) -> None:
    buffer = io.BytesIO()
    np.savez(buffer, **sample.dump())
    write_whole(Path(f"{stem}.sample"), buffer.getvalue())


def _load_sample(stem: str) -> LabelSample:
    with np.load(f"{stem}.sample", allow_pickle=False) as arrays:
        return LabelSample(**arrays)


# ---- arrays on disk, in partitions by hash


def load_splits(stem: str) -> NDArray[np.int8]:
    return np.load(f"{stem}.npy", allow_pickle=False)


def _save_parts(stem: str, rows: NDArray[Any], hashes: Hashes, parts: int) -> None:
    where = bucket_of(hashes, parts)
    for part in range(parts):
        _save(f"{stem}.part-{part:04}.npy", rows[where == part])


def _load_part(stem: str, part: int) -> NDArray[Any]:
    return np.load(f"{stem}.part-{part:04}.npy", allow_pickle=False)


def _save(path: str, rows: NDArray[Any]) -> None:
    buffer = io.BytesIO()
    np.save(buffer, rows, allow_pickle=False)
    write_whole(Path(path), buffer.getvalue())
