# SPDX-License-Identifier: Apache-2.0
"""tf.train.Example, thousands at a time: records ↔ an Arrow table.

An Example is a map from names to lists of bytes, of float32 or of int64, as a protobuf message. A
feature is stored as a header, which its name, its kind and the size of its values determine, and
the values. Reading learns headers from one record and looks for them in all others at once; what
does not look like that (another encoding of the same message) is read field by field, exactly.

Invariant: rows + bad == records, in order. Nothing is raised for what a record holds.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from manyhands.data.schema import unify
from manyhands.data.tfrecord.framing import (
    Buffer,
    Bytes,
    Damage,
    Positions,
    as_bytes,
    contents,
    gather,
    joined,
    large_binary,
    offsets_of,
)
from manyhands.errors import DataError

Kind: TypeAlias = pa.DataType
"""What a column should be: int64, float32 or binary (or what these can be cast to), one value per
record, a fixed number of them (`pa.list_(t, n)`) or any number (`pa.list_(t)`)."""

NONE, BYTES, FLOATS, INTS = 0, 1, 2, 3
_TYPES = {BYTES: pa.binary(), FLOATS: pa.float32(), INTS: pa.int64()}
_NAMES = {BYTES: "bytes", FLOATS: "floats", INTS: "integers"}
_WIRES = {BYTES: (2,), FLOATS: (2, 5), INTS: (2, 0)}
"""Wire types of the values: with a length (packed, if they are numbers), or one by one."""
_CUT = {FLOATS: "a float is cut off", INTS: "an integer has no end"}

MOST_BYTES = 2**31 - 1
"""At once; Arrow's lists count in 32 bits."""

_FEW = 16
"""So few records are not worth a round of numpy calls."""

_ROWS = 1 << 13
_BLOCK = 1 << 17
"""Records, or bytes, to work on at a time, so that what is in between stays in the cache."""

_CELLS = 1 << 22
"""A table may have so many, or as many as its records have bytes: else most would be null."""

_LONG_NAME = 200
"""Characters; features with longer names are not looked for by their headers."""

_MISSES = 64
"""So often may a record be looked at that teaches little about the others."""


@dataclass(frozen=True, slots=True)
class Parsed:
    table: pa.Table
    rows: Positions
    """Of each row: which record it was."""
    bad: list[Damage]
    """The other records, ascending."""


def parse(
    buffer: Buffer,
    starts: Positions,
    lengths: Positions,
    columns: Mapping[str, Kind] | None = None,
    *,
    others: bool = False,
) -> Parsed:
    """Records as a table: the given columns, or all there are, sorted by name, types inferred.

    With `others`, columns that are not given are inferred and follow. A feature that a record does
    not have is null. One that has another kind or number of values than its column makes the
    record bad.
    """
    data, every = as_bytes(buffer), others or columns is None
    if lengths.sum() > MOST_BYTES:
        raise DataError("more than 2 GiB of Examples were to be parsed at once; take fewer.")
    found = _scan(*_together(data, starts, lengths), None if every else set(columns or ()))
    arrays = _columns(found, columns or {})
    if found.cut:  # then once more without these, so that nothing is inferred from them
        found.bad = dict(found.cut)
        _forget(found, np.array(sorted(found.cut)))
        arrays = _columns(found, columns or {})
    number = np.arange(len(starts))
    bad = [Damage(i, int(starts[i]), what) for i, what in sorted(found.bad.items())]
    # A table without columns has no rows, unless it once had a column: the numbers.
    table = pa.Table.from_arrays([pa.array(number), *arrays.values()], ["", *arrays])
    if bad:
        number = np.delete(number, [damage.record for damage in bad])
        table = table.take(pa.array(number))
    return Parsed(table.select(list(range(1, len(arrays) + 1))), number, bad)


def _together(
    data: Bytes, starts: Positions, lengths: Positions
) -> tuple[Bytes, Positions, Positions]:
    """Bytes that hold little but these records, in order, and where each starts and ends."""
    first, ends = int(starts[0]) if len(starts) else 0, starts + lengths
    stop = int(ends[-1]) if len(starts) else 0
    if (starts[1:] >= ends[:-1]).all() and stop - first <= 4 * lengths.sum() + _BLOCK:
        return data[first:stop], starts - first, ends - first
    parts = [data.data[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]
    offsets = offsets_of(lengths)
    return as_bytes(b"".join(parts)), offsets[:-1], offsets[1:]


# Where the values of every record are.

_Values = tuple[Positions, Positions, Positions]
"""Values of bytes: of which record, where, how long."""


@dataclass(slots=True)
class _Feature:
    """One feature in all records: its kind in each, and where its values are."""

    kind: NDArray[np.uint8]
    at: Positions
    size: Positions
    values: list[_Values] = field(default_factory=list[_Values])
    """Of the kind BYTES; in order within each record."""


@dataclass(slots=True)
class _Found:
    data: Bytes
    records: int
    wanted: set[str] | None = None
    """Names of features; None for all."""
    features: dict[str, _Feature] = field(default_factory=dict[str, _Feature])
    cut: dict[int, str] = field(default_factory=dict[int, str])
    """Records that are no Examples, and why."""
    bad: dict[int, str] = field(default_factory=dict[int, str])
    """Records that do not fit the columns, and why."""

    def feature(self, name: str) -> _Feature:
        if name not in self.features:
            n = self.records
            if self.wanted is None and len(self.features) * n > max(self.data.size, _CELLS):
                raise DataError(
                    f"{n:,} records have more than {len(self.features):,} different features, most "
                    "of which each record lacks. Name the columns that are wanted."
                )
            kind, at, size = np.zeros(n, np.uint8), np.zeros(n, np.int64), np.zeros(n, np.int64)
            self.features[name] = _Feature(kind, at, size)
        return self.features[name]

    def wants(self, name: str) -> bool:
        return self.wanted is None or name in self.wanted


def _scan(data: Bytes, starts: Positions, ends: Positions, wanted: set[str] | None) -> _Found:
    """Most records by their headers, the odd ones field by field."""
    found = _Found(data, len(starts), wanted)
    odd = _walk(found, starts, ends)
    for feature in found.features.values():
        rows = np.flatnonzero(feature.kind == BYTES)
        feature.values, strange = _split(data, rows, feature.at[rows], feature.size[rows])
        odd |= strange
    if odd:
        _read_odd(found, np.array(sorted(odd)), starts, ends)
    return found


def _forget(found: _Found, records: Positions) -> None:
    for feature in found.features.values():
        feature.kind[records] = NONE
        kept = [~np.isin(row, records) for row, _, _ in feature.values]
        feature.values = [
            (row[keep], at[keep], size[keep])
            for (row, at, size), keep in zip(feature.values, kept, strict=True)
        ]


def _read_odd(found: _Found, odd: Positions, starts: Positions, ends: Positions) -> None:
    _forget(found, odd)
    merged = bytearray()
    for record in odd.tolist():
        start = int(starts[record])
        raw = found.data[start : int(ends[record])].tobytes()
        try:
            lists = {name: value for name, value in _read(raw).items() if found.wants(name)}
            pieces = {name: _pieces(raw, *value) for name, value in lists.items()}
        except _Malformed as problem:
            found.cut[record] = str(problem)
            continue
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


@dataclass(frozen=True, slots=True)
class _Header:
    """What stands before the values of a feature, whatever their size."""

    name: str
    kind: int
    size: int
    lengths: tuple[tuple[int, int], ...]
    """Numbers in it that count what follows them up to the end of the values: (where, bytes)."""
    words: tuple[tuple[int, int, int], ...]
    """The rest of it, 8 bytes at a time: (where, expected, mask)."""

    def find(
        self, data: Bytes, at: Positions, ends: Positions
    ) -> tuple[NDArray[np.bool_], Positions]:
        """Does it stand at `at`, with all its values before `ends`? And where do they end?"""
        if self.size > data.size:
            return np.zeros(len(at), dtype=np.bool_), at
        here = np.minimum(at, data.size - self.size)
        words = np.ndarray((data.size - 7,), dtype="<u8", buffer=data, strides=(1,))
        wrong = np.zeros(len(at), dtype=np.uint64)
        for where, expected, mask in self.words:
            wrong |= (words[here + where] & np.uint64(mask)) ^ np.uint64(expected)
        hit, stop = (wrong == 0) & (here == at), here + self.size
        for i, (where, width) in enumerate(self.lengths):
            reach = here + (where + width)
            for k in range(width):
                reach += (data[here + (where + k)] & np.uint8(0x7F)).astype(np.int64) << (7 * k)
            if i:
                hit &= reach == stop
            stop = reach
        return hit & (stop <= ends), stop


def _header_parts(name: str, kind: int, size: int) -> list[bytes]:
    """What stands before `size` bytes of values, every second part a length. Values that are bytes
    have headers of their own (0A, length); the others are packed."""
    key = name.encode()
    leads = [b"\x0a", b"\x0a" + _varint(len(key)) + key + b"\x12"]
    leads += [bytes([kind << 3 | 2])] if kind else []
    leads += [b"\x0a"] if size and kind != BYTES else []
    parts: list[bytes] = []
    for lead in reversed(leads):
        parts = [lead, _varint(size + sum(map(len, parts))), *parts]
    return parts


@functools.lru_cache(maxsize=4096)
def _header(name: str, kind: int, size: int) -> _Header | None:
    """The header of such a feature as something to look for; None if it is too short for that."""
    parts = _header_parts(name, kind, size)
    raw, mask = b"".join(parts), b""
    lengths: list[tuple[int, int]] = []
    for i, part in enumerate(parts):
        counts = size > 0 and i % 2 == 1
        lengths += [(len(mask), len(part))] if counts else []
        mask += (b"\x80" if counts else b"\xff") * len(part)
    if len(raw) < 8:
        return None
    words: list[tuple[int, int, int]] = []
    for where in [*range(0, len(raw) - 8, 8), len(raw) - 8]:
        bits = int.from_bytes(mask[where : where + 8], "little")
        words.append((where, int.from_bytes(raw[where : where + 8], "little") & bits, bits))
    return _Header(name, kind, len(raw), tuple(lengths), tuple(words))


def _walk(found: _Found, starts: Positions, ends: Positions) -> set[int]:
    """Note where features are in all records that look as expected; the others are returned."""
    length, at = _varints(found.data, starts + 1, ends)
    plain = (at + length == ends) & (at >= 0)
    plain[plain] = found.data[starts[plain]] == 0x0A
    odd = set(np.flatnonzero(~plain & (starts < ends)).tolist())
    at, headers = np.where(plain, at, ends), list[_Header]()
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
    found: _Found, headers: list[_Header], rows: Positions, at: Positions, ends: Positions
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


def _learn(headers: list[_Header], raw: bytes) -> list[_Header]:
    """Add the headers that a record should have, each after the one that precedes it there. What
    is new is returned."""
    new, place = list[_Header](), 0
    for name, kind, size in _sizes(raw):
        header = _header(name, kind, size)
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
        for name, (kind, lists) in _read(raw).items():
            if len(name) < _LONG_NAME:
                sizes = [b - a for a, b in _pieces(raw, kind, lists)]
                own = sum(1 + len(_varint(n)) for n in sizes) if kind == BYTES else 0
                yield name, kind, sum(sizes) + own
    except _Malformed:
        return


def _advance(
    found: _Found, header: _Header, rows: Positions, at: Positions, ends: Positions
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
    data: Bytes, rows: Positions, at: Positions, size: Positions
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


def _varints(data: Bytes, at: Positions, ends: Positions) -> tuple[Positions, Positions]:
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


# One record, field by field.


class _Malformed(Exception):
    """Not a protobuf message, or not an Example."""


_Places = list[tuple[int, int]]
"""Where things begin and end."""


def _read(data: bytes) -> dict[str, tuple[int, _Places]]:
    """The features of an Example in any encoding that protobuf allows, with their kind and lists.

    Unknown fields are skipped, parts of a message merged; of several features with one name, the
    last counts.
    """
    found: dict[str, tuple[int, _Places]] = {}
    for number, wire, start, stop in _fields(data, 0, len(data)):
        if (number, wire) == (1, 2):
            for inner, inner_wire, a, b in _fields(data, start, stop):
                if (inner, inner_wire) == (1, 2):
                    name, kind, lists = _read_entry(data, a, b)
                    found[name] = kind, lists
    return found


def _read_entry(data: bytes, start: int, stop: int) -> tuple[str, int, _Places]:
    name, kind, lists = "", NONE, _Places()
    for number, wire, a, b in _fields(data, start, stop):
        if (number, wire) == (1, 2):
            name = _read_name(data[a:b])
        elif (number, wire) == (2, 2):
            for of_kind, its_wire, c, d in _fields(data, a, b):
                if its_wire == 2 and of_kind in _TYPES:
                    if of_kind != kind:
                        kind, lists = of_kind, _Places()
                    lists.append((c, d))
    return name, kind, lists


def _read_name(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise _Malformed(f"the name of a feature, {raw[:40]!r}, is not UTF-8") from None


def _pieces(data: bytes, kind: int, lists: _Places) -> _Places:
    """Where the values in these lists are; numbers may stand several in a place."""
    pieces = _Places()
    for start, stop in lists:
        for number, wire, a, b in _fields(data, start, stop):
            if number == 1 and wire in _WIRES[kind]:
                if (kind == FLOATS and (b - a) % 4) or (
                    kind == INTS and b > a and data[b - 1] >= 0x80
                ):
                    raise _Malformed(_CUT[kind])
                pieces.append((a, b))
    return pieces


def _fields(data: bytes, at: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
    """The fields of a message: number, wire type, and where the contents are. Groups are passed
    over."""
    groups: list[int] = []
    while at < stop:
        tag, begin = _read_varint(data, at, stop, 5)
        number, wire, at = tag >> 3, tag & 7, begin
        if wire == 0:
            at = _read_varint(data, at, stop, 10)[1]
        elif wire == 2:
            length, begin = _read_varint(data, at, stop, 5)
            at = begin + length
        elif wire == 3:
            groups.append(number)
        elif wire == 4:
            if not groups or groups.pop() != number:
                raise _Malformed(f"it is not an Example: a group ends at its byte {begin}")
            continue
        else:
            at += {1: 8, 5: 4}.get(wire, stop + 1)
        if at > stop or not number or tag >> 32 or len(groups) > 100:
            raise _Malformed(f"it is not an Example: its byte {begin} makes no sense")
        if not groups:
            yield number, wire, begin, at
    if groups:
        raise _Malformed("it is not an Example: a group does not end")


def _read_varint(data: bytes, at: int, stop: int, most: int) -> tuple[int, int]:
    value = 0
    for k in range(most):
        if at + k >= stop:
            break
        value |= (data[at + k] & 0x7F) << (7 * k)
        if data[at + k] < 0x80:
            return value, at + k + 1
    raise _Malformed(f"it is not an Example: the number at its byte {at} has no end")


def _varint(value: int) -> bytes:
    raw = bytearray()
    while value >= 0x80:
        raw.append(value & 0x7F | 0x80)
        value >>= 7
    raw.append(value)
    return bytes(raw)


# Values → columns.


def _columns(found: _Found, given: Mapping[str, Kind]) -> dict[str, pa.Array]:
    inferred = sorted(n for n, f in found.features.items() if n not in given and f.kind.any())
    wanted: dict[str, Kind | None] = {**given, **dict.fromkeys(inferred)}
    return {name: _column(found, name, kind) for name, kind in wanted.items()}


def _column(found: _Found, name: str, wanted: Kind | None) -> pa.Array:
    """One column of all records; where a record does not fit, it is blamed and null."""
    feature = found.features.get(name)
    if feature is None or not feature.kind.any():
        return pa.nulls(found.records, wanted)
    kinds = (np.flatnonzero(np.bincount(feature.kind, minlength=4)[1:]) + 1).tolist()
    if wanted == pa.null():
        wanted = None
    base = unify(_TYPES[k] for k in kinds) if wanted is None else _inner(wanted)
    kind = _kind(name, base)
    for other in kinds:
        if other != kind:
            what = f"feature '{name}' holds {_NAMES[other]}; {_NAMES[kind]} are expected"
            _blame(found.bad, np.flatnonzero(feature.kind == other), what)
    rows = np.flatnonzero(feature.kind == kind)
    values, counts, whole = _DECODERS[kind](found.data, feature, rows)
    _blame(found.cut, rows[~whole], f"feature '{name}': {_CUT.get(kind)}")
    shape = _shape(base, kind, counts[whole]) if wanted is None else wanted
    fits = whole & _fits(shape, counts)
    for row, n in zip(rows[whole & ~fits].tolist(), counts[whole & ~fits].tolist(), strict=True):
        found.bad.setdefault(row, f"feature '{name}' has {n} values; its column is {shape}")
    if not fits.all():
        values = values.filter(pa.array(np.repeat(fits, counts)))
        rows, counts = rows[fits], counts[fits]
    array = _in_lists(shape, values, counts)
    if len(rows) < found.records:
        index = np.full(found.records, -1)
        index[rows] = np.arange(len(rows))
        array = array.take(pa.array(index, mask=index < 0))
    return _cast(found, name, array, shape)


def _blame(where: dict[int, str], records: Positions, what: str) -> None:
    for record in records.tolist():
        where.setdefault(record, what)


def _shape(base: Kind, kind: int, counts: Positions) -> Kind:
    """One value, a fixed number of them or a list, by how many there always are."""
    least, most = (int(counts.min()), int(counts.max())) if counts.size else (1, 1)
    if least == most == 1:
        return base
    return pa.list_(base, most if least == most and most and kind != BYTES else -1)


def _fits(shape: Kind, counts: Positions) -> NDArray[np.bool_]:
    if pa.types.is_fixed_size_list(shape):
        return counts == shape.list_size
    return counts == 1 if _inner(shape) == shape else np.ones(len(counts), dtype=np.bool_)


def _in_lists(shape: Kind, values: pa.Array, counts: Positions) -> pa.Array:
    if pa.types.is_fixed_size_list(shape):
        return pa.FixedSizeListArray.from_arrays(values, shape.list_size)
    if _inner(shape) == shape:
        return values
    return pa.ListArray.from_arrays(pa.array(offsets_of(counts).astype(np.int32)), values)


def _inner(shape: Kind) -> Kind:
    return shape.value_type if _is_list(shape) else shape


def _is_list(kind: Kind) -> bool:
    t = pa.types
    return t.is_list(kind) or t.is_large_list(kind) or t.is_fixed_size_list(kind)


def _kind(name: str, base: Kind) -> int:
    """Which kind of feature holds values of this type."""
    t = pa.types
    if t.is_integer(base) or t.is_boolean(base) or t.is_timestamp(base):
        return INTS
    if t.is_floating(base):
        return FLOATS
    of_bytes = (t.is_binary, t.is_string, t.is_large_binary, t.is_large_string)
    if t.is_fixed_size_binary(base) or any(holds(base) for holds in of_bytes):
        return BYTES
    raise DataError(
        f"column '{name}' is {base}, which a tf.train.Example cannot hold: only integers, floats, "
        "bytes, text and lists of them."
    )


def _cast(found: _Found, name: str, array: pa.Array, kind: Kind) -> pa.Array:
    if array.type == kind:
        return array
    try:
        return array.cast(kind)
    except pa.ArrowInvalid:
        fits = np.array([_casts(array[i : i + 1], kind) for i in range(len(array))])
        what = f"feature '{name}' does not fit its column, {kind}"
        _blame(found.bad, np.flatnonzero(~fits), what)
        return array.take(pa.array(np.arange(len(array)), mask=~fits)).cast(kind)


def _casts(array: pa.Array, kind: Kind) -> bool:
    try:
        array.cast(kind)
    except pa.ArrowInvalid:
        return False
    return True


_Decoded = tuple[pa.Array, Positions, NDArray[np.bool_]]
"""All values end to end, how many each row has, and which rows are whole (the others have none)."""


def _bytes(data: Bytes, feature: _Feature, rows: Positions) -> _Decoded:
    none = np.zeros(0, dtype=np.int64)
    row, at, size = map(np.concatenate, zip((none, none, none), *feature.values, strict=True))
    if len(feature.values) > 1:
        order = np.argsort(row, kind="stable")
        row, at, size = row[order], at[order], size[order]
    raw, offsets = contents(gather(data, at, size))
    buffers = [None, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(raw)]
    values = pa.Array.from_buffers(pa.binary(), len(row), buffers)
    counts = np.bincount(row, minlength=len(feature.kind))[rows]
    return values, counts, np.ones(len(rows), dtype=np.bool_)


def _floats(data: Bytes, feature: _Feature, rows: Positions) -> _Decoded:
    whole = feature.size[rows] % 4 == 0
    size = np.where(whole, feature.size[rows], 0)
    raw, _ = contents(gather(data, feature.at[rows], size))
    return pa.array(raw.view("<f4")), size // 4, whole


def _ints(data: Bytes, feature: _Feature, rows: Positions) -> _Decoded:
    at, size = feature.at[rows], feature.size[rows]
    whole = (size == 0) | (data[at + size - 1] < 0x80)
    total = np.cumsum(size)
    edges = np.searchsorted(total, np.arange(0, total[-1] if len(rows) else 0, _BLOCK)).tolist()
    values, counts = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    for a, b in zip([0, *edges[1:]], [*edges[1:], len(rows)], strict=True):
        numbers, per_row = _varint_block(data, at[a:b], size[a:b], whole[a:b])
        values.append(numbers)
        counts.append(per_row)
    return pa.array(np.concatenate(values)), np.concatenate(counts), whole


def _varint_block(
    data: Bytes, at: Positions, size: Positions, whole: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], Positions]:
    """All values, and how many each row has. Rows with a number of more than 10 bytes are marked
    as not whole."""
    while True:
        raw, offsets = contents(gather(data, at, np.where(whole, size, 0)))
        ends = np.flatnonzero(raw < 0x80) + 1
        begins = np.concatenate([[0], ends[:-1]])[: len(ends)]
        width = ends - begins
        if not width.size or width.max() <= 10:
            break
        whole[np.searchsorted(offsets, begins[width > 10], side="right") - 1] = False
    return _decode(raw, begins, width), np.diff(np.searchsorted(ends, offsets, side="right"))


_DECODERS: dict[int, Callable[[Bytes, _Feature, Positions], _Decoded]] = {
    BYTES: _bytes,
    FLOATS: _floats,
    INTS: _ints,
}

_SQUEEZE = [
    (2, 1, 0x007F007F007F007F),
    (4, 2, 0x00003FFF00003FFF),
    (8, 4, 0x000000000FFFFFFF),
]
"""To squeeze 8 groups of 7 bits, a byte each, into 56 bits: pairs, then pairs of pairs, ..."""


def _decode(raw: Bytes, begins: Positions, width: Positions) -> NDArray[np.int64]:
    """Varints of up to 10 bytes, all at once: 8 bytes by shifting, the last two one by one."""
    most = int(width.max()) if width.size else 0
    if most <= 1:
        return raw.astype(np.int64)
    padded = np.concatenate([raw, np.zeros(8, dtype=np.uint8)])
    words = np.ndarray((len(raw) + 1,), dtype="<u8", buffer=padded, strides=(1,))
    used = np.array([(1 << 8 * k) - 1 & 0x7F7F7F7F7F7F7F7F for k in range(11)], dtype=np.uint64)
    x = words[begins] & used[width]
    for step, (size, shift, low) in enumerate(_SQUEEZE):
        if most > size // 2:
            high = low << (8 << step)
            x = (x & np.uint64(low)) | ((x & np.uint64(high)) >> np.uint64(shift))
    for k in (8, 9):
        long = np.flatnonzero(width > k) if most > k else begins[:0]
        x[long] |= (raw[begins[long] + k] & np.uint8(0x7F)).astype(np.uint64) << np.uint64(7 * k)
    return x.view(np.int64)


# Columns → records.


def encode(table: pa.Table) -> tuple[Bytes, Positions, Positions]:
    """Each row as a tf.train.Example: the bytes, and where each starts and how long it is.

    As TensorFlow writes them with `deterministic=True`: features sorted by name, numbers packed. A
    null is a feature left out. Floats become float32, integers and booleans int64, text UTF-8.
    """
    names = table.column_names
    if len(set(names)) < len(names):
        raise DataError("two columns have the same name; a tf.train.Example can hold only one.")
    if table.nbytes > MOST_BYTES:
        raise DataError("more than 2 GiB were to be encoded as Examples at once; take fewer rows.")
    pieces: list[pa.LargeBinaryArray] = []
    for name in sorted(names):
        array = table[name].combine_chunks()
        if not pa.types.is_null(array.type):
            pieces += _encoded(name, array)
    size = np.zeros(table.num_rows, dtype=np.int64)
    for piece in pieces:
        size += np.diff(contents(piece)[1])
    pieces.insert(0, _by_size(size, lambda n: b"\x0a" + _varint(n)))
    raw, offsets = contents(joined(pieces))
    return raw, offsets[:-1], np.diff(offsets)


def _encoded(name: str, array: pa.Array) -> list[pa.LargeBinaryArray]:
    """The headers of this feature in all rows, and its values."""
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    there = array.is_valid().to_numpy(zero_copy_only=False)
    kind = _kind(name, _inner(array.type))
    if _is_list(array.type):
        values = array.flatten()
        counts = pc.call_function("list_value_length", [array]).fill_null(0).to_numpy()
    else:
        values, counts = array.drop_null(), there.astype(np.int64)
    if values.null_count:
        raise DataError(
            f"column '{name}' has a null within a list, which a tf.train.Example cannot hold."
        )
    raw, offsets = _packed(name, kind, values)
    edges = offsets[offsets_of(counts)]
    size = np.where(there, np.diff(edges), -1)
    headers = _by_size(size, lambda n: b"".join(_header_parts(name, kind, n)) if n >= 0 else b"")
    return [headers, large_binary(raw, edges)]


def _packed(name: str, kind: int, values: pa.Array) -> tuple[Bytes, Positions]:
    """The bytes of all values, and where each begins."""
    if kind == BYTES:
        array = values.cast(pa.large_binary())
        headers = _by_size(np.diff(contents(array)[1]), lambda n: b"\x0a" + _varint(n))
        return contents(joined([headers, array]))
    if kind == FLOATS:
        with np.errstate(over="ignore"):
            floats = values.to_numpy(zero_copy_only=False).astype("<f4")
        return floats.view(np.uint8), np.arange(len(floats) + 1) * 4
    try:
        ints = values.cast(pa.int64()).to_numpy().view(np.uint64)
    except pa.ArrowInvalid as error:
        raise DataError(f"column '{name}' does not fit int64: {error}") from None
    most = len(_varint(int(ints.max()))) if ints.size else 1
    width = np.ones(len(ints), dtype=np.int64)
    for k in range(1, most):
        width += ints >= np.uint64(1 << 7 * k)
    rows = np.empty((len(ints), most), dtype=np.uint8)
    for k in range(most):
        rows[:, k] = (ints >> np.uint64(7 * k)) & np.uint64(0x7F)
        rows[:, k] |= np.uint8(0x80) * (width > k + 1)
    return rows[np.arange(most) < width[:, None]], offsets_of(width)


def _by_size(sizes: Positions, make: Callable[[int], bytes]) -> pa.LargeBinaryArray:
    """make(size) for each; made once for each size there is."""
    distinct, which = np.unique(sizes, return_inverse=True)
    made = pa.array([make(n) for n in distinct.tolist()], pa.large_binary())
    return made.take(pa.array(which))
