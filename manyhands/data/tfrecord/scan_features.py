# SPDX-License-Identifier: Apache-2.0
"""Where the values of every feature are, in thousands of Examples at once.

Headers are learned from one record and looked for in all others; what does not look like that
(another encoding of the same message) is read field by field.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from manyhands.data.columns.array_types import ByteArray, Positions
from manyhands.data.tfrecord.feature_headers import FeatureHeader, header_of
from manyhands.data.tfrecord.feature_kinds import BYTES, NONE
from manyhands.data.tfrecord.framing import as_bytes
from manyhands.data.tfrecord.parse_one_example import (
    Malformed,
    places_of,
    read_example,
    read_feature_lists,
    varint,
)
from manyhands.values.errors import DataError

_FEW = 16
"""So few records are not worth a round of numpy calls."""

_ROWS = 1 << 13
"""Records to work on at a time, so that what is in between stays in the cache."""

_CELLS = 1 << 22
"""A table may have so many, or as many as its records have bytes: else most would be null."""

_LONG_NAME = 200
"""Characters; features with longer names are not looked for by their headers."""

_MISSES = 64
"""So often may a record be looked at that teaches little about the others."""

_Values = tuple[Positions, Positions, Positions]
"""Values of bytes: of which record, where, how long."""


@dataclass(slots=True)
class Feature:
    """One feature in all records: its kind in each, and where its values are."""

    kind: NDArray[np.uint8]
    at: Positions
    size: Positions
    values: list[_Values] = field(default_factory=list[_Values])
    """Of the kind BYTES; in order within each record."""


@dataclass(slots=True)
class FoundFeatures:
    data: ByteArray
    records: int
    wanted: set[str] | None = None
    """Names of features; None for all."""
    features: dict[str, Feature] = field(default_factory=dict[str, Feature])
    lists: set[str] = field(default_factory=set[str])
    """Names of feature lists: a list of one is a list there."""
    cut: dict[int, str] = field(default_factory=dict[int, str])
    """Records that are no Examples, and why."""
    bad: dict[int, str] = field(default_factory=dict[int, str])
    """Records that do not fit the columns, and why."""

    def feature(self, name: str) -> Feature:
        if name not in self.features:
            n = self.records
            if self.wanted is None and len(self.features) * n > max(self.data.size, _CELLS):
                raise DataError(
                    f"{n:,} records have more than {len(self.features):,} different features, most "
                    "of which each record lacks. Name the columns that are wanted."
                )
            kind, at, size = np.zeros(n, np.uint8), np.zeros(n, np.int64), np.zeros(n, np.int64)
            self.features[name] = Feature(kind, at, size)
        return self.features[name]

    def wants(self, name: str) -> bool:
        return self.wanted is None or name in self.wanted


def scan(
    data: ByteArray, starts: Positions, ends: Positions, wanted: set[str] | None
) -> FoundFeatures:
    """Most records by their headers, the odd ones field by field."""
    found = FoundFeatures(data, len(starts), wanted)
    odd = _walk(found, starts, ends)
    for feature in found.features.values():
        rows = np.flatnonzero(feature.kind == BYTES)
        feature.values, strange = _split(data, rows, feature.at[rows], feature.size[rows])
        odd |= strange
    if odd:
        _read_odd(found, np.array(sorted(odd)), starts, ends)
    return found


def forget(found: FoundFeatures, records: Positions) -> None:
    for feature in found.features.values():
        feature.kind[records] = NONE
        kept = [~np.isin(row, records) for row, _, _ in feature.values]
        feature.values = [
            (row[keep], at[keep], size[keep])
            for (row, at, size), keep in zip(feature.values, kept, strict=True)
        ]


def _read_odd(found: FoundFeatures, odd: Positions, starts: Positions, ends: Positions) -> None:
    forget(found, odd)
    merged = bytearray()
    for record in odd.tolist():
        start = int(starts[record])
        raw = found.data[start : int(ends[record])].tobytes()
        try:
            every, listed = read_example(raw), read_feature_lists(raw)
            if both := sorted({*every} & {*listed}):
                raise Malformed(f"'{both[0]}' is a feature of its context and a feature list")
            lists = {name: v for name, v in (every | listed).items() if found.wants(name)}
            pieces = {name: places_of(raw, *value) for name, value in lists.items()}
        except Malformed as problem:
            found.cut[record] = str(problem)
            continue
        found.lists |= {*listed} & {*lists}
        for name, (kind, _) in lists.items():
            feature, places = found.feature(name), pieces[name]
            at, sizes = start + places[0][0] if places else start, [b - a for a, b in places]
            if kind == BYTES:
                begins = np.array([start + a for a, _ in places], dtype=np.int64)
                feature.values.append((np.full(len(places), record), begins, np.array(sizes)))
            elif len(places) > 1:
                at = found.data.size + len(merged)
                merged += b"".join(raw[a:b] for a, b in places)
            feature.kind[record], feature.at[record], feature.size[record] = kind, at, sum(sizes)
    if merged:
        found.data = np.concatenate([found.data, as_bytes(merged)])


# Headers, learned from one record and looked for in all others.


def _walk(found: FoundFeatures, starts: Positions, ends: Positions) -> set[int]:
    """Note where features are in all records that look as expected; the others are returned."""
    length, at = _varints(found.data, starts + 1, ends)
    plain = (at + length == ends) & (at >= 0)
    plain[plain] = found.data[starts[plain]] == 0x0A
    odd = set(np.flatnonzero(~plain & (starts < ends)).tolist())
    at, headers = np.where(plain, at, ends), list[FeatureHeader]()
    for first in range(0, len(at), _ROWS):
        left, misses = np.arange(first, min(first + _ROWS, len(at))), 0
        _follow(found, headers, left, at, ends)
        while (left := left[at[left] < ends[left]]).size and misses < _MISSES:
            record, before = int(left[0]), at[left]
            for header in _learn(headers, found.data[starts[record] : ends[record]].tobytes()):
                _advance(found, header, left, at, ends)
            moved = left[at[left] > before]
            misses += len(moved) * 64 < len(left)
            _follow(found, headers, moved, at, ends)
            if at[record] < ends[record]:
                odd.add(record)
                at[record] = ends[record]
        odd |= set(left.tolist())
    return odd


def _follow(
    found: FoundFeatures,
    headers: list[FeatureHeader],
    rows: Positions,
    at: Positions,
    ends: Positions,
) -> None:
    """Go on in these records as long as the next thing is a header that is known.

    A round per header is enough for any order of them, unless a record repeats itself.
    """
    for _ in headers:
        rows = rows[at[rows] < ends[rows]]
        if not rows.size:
            return
        before = at[rows]
        for header in headers:
            _advance(found, header, rows, at, ends)
        rows = rows[at[rows] > before]


def _learn(headers: list[FeatureHeader], raw: bytes) -> list[FeatureHeader]:
    """Add the headers that a record should have, each after the one that precedes it there. What
    is new is returned."""
    new, place = list[FeatureHeader](), 0
    for name, kind, size in _sizes(raw):
        header = header_of(name, kind, size)
        if header is None:
            continue
        if header not in headers:
            headers.insert(place, header)
            new.append(header)
        place = headers.index(header) + 1
    return new


def _sizes(raw: bytes) -> Iterator[tuple[str, int, int]]:
    """The features of a record, their kind, and how many bytes their values would usually take."""
    try:
        for name, (kind, lists) in read_example(raw).items():
            if len(name) < _LONG_NAME:
                sizes = [b - a for a, b in places_of(raw, kind, lists)]
                own = sum(1 + len(varint(n)) for n in sizes) if kind == BYTES else 0
                yield name, kind, sum(sizes) + own
    except Malformed:
        return


def _advance(
    found: FoundFeatures, header: FeatureHeader, rows: Positions, at: Positions, ends: Positions
) -> None:
    """Take in the feature where its header is the next thing in a record. The last one wins."""
    hit, stop = header.find(found.data, at[rows], ends[rows])
    if not hit.all():
        rows, stop = rows[hit], stop[hit]
    if rows.size and found.wants(header.name):
        feature, begin = found.feature(header.name), at[rows] + header.size
        feature.kind[rows], feature.at[rows], feature.size[rows] = header.kind, begin, stop - begin
    at[rows] = stop


def _split(
    data: ByteArray, rows: Positions, at: Positions, size: Positions
) -> tuple[list[_Values], set[int]]:
    """The values in lists of bytes; and the rows in which something else is found as well."""
    values, odd, ends = list[_Values](), set[int](), at + size
    more = size > 0
    while more.any():
        rows, at, ends = rows[more], at[more], ends[more]
        if values and len(rows) < _FEW:
            return values, odd | set(rows.tolist())
        length, begin = _varints(data, at + 1, ends)
        fits = (data[at] == 0x0A) & (begin >= 0) & (begin + length <= ends)
        odd |= set(rows[~fits].tolist())
        values.append((rows[fits], begin[fits], length[fits]))
        at = begin + length
        more = fits & (at < ends)
    return values, odd


def _varints(data: ByteArray, at: Positions, ends: Positions) -> tuple[Positions, Positions]:
    """The length that stands at each position, and where it ends: -1 if not before `ends`."""
    value, after = np.zeros(len(at), dtype=np.int64), np.full(len(at), -1)
    going = at < ends
    for k in range(5):
        if not going.any():
            break
        byte = np.where(going, data[np.where(going, at + k, 0)], np.uint8(0))
        value |= (byte & np.uint8(0x7F)).astype(np.int64) << (7 * k)
        after = np.where(going & (byte < 0x80), at + k + 1, after)
        going &= (byte >= 0x80) & (at + k + 1 < ends)
    return value, after
