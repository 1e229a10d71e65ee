# SPDX-License-Identifier: Apache-2.0
"""tf.train.Example, thousands at a time: records → an Arrow table.

An Example is a map from names to lists of bytes, of float32 or of int64, as a protobuf message.
Where the values are is found by `scan_features`; here they become columns, whose types are given or
inferred.

Invariant: rows + bad == records, in order. Nothing is raised for what a record holds.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from manyhands.data.columns.array_types import ByteArray, Positions
from manyhands.data.columns.schema import unify
from manyhands.data.tfrecord.feature_kinds import (
    BYTES,
    FLOATS,
    INTS,
    MOST_BYTES,
    TYPES,
    FeatureType,
    inner_type,
    kind_of,
)
from manyhands.data.tfrecord.framing import (
    ByteBuffer,
    FrameDamage,
    as_bytes,
    contents,
    gather,
    offsets_of,
)
from manyhands.data.tfrecord.parse_one_example import CUT
from manyhands.data.tfrecord.scan_features import Feature, FoundFeatures, forget, scan
from manyhands.values.errors import DataError

_NAMES = {BYTES: "bytes", FLOATS: "floats", INTS: "integers"}

_BLOCK = 1 << 17
"""Bytes to work on at a time, so that what is in between stays in the cache."""


@dataclass(frozen=True, slots=True)
class Parsed:
    table: pa.Table
    rows: Positions
    """Of each row: which record it was."""
    bad: list[FrameDamage]
    """The other records, ascending."""


def parse(
    buffer: ByteBuffer,
    starts: Positions,
    lengths: Positions,
    columns: Mapping[str, FeatureType] | None = None,
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
    found = scan(*_together(data, starts, lengths), None if every else set(columns or ()))
    arrays = _columns(found, columns or {})
    if found.cut:  # then once more without these, so that nothing is inferred from them
        found.bad = dict(found.cut)
        forget(found, np.array(sorted(found.cut)))
        arrays = _columns(found, columns or {})
    number = np.arange(len(starts))
    bad = [FrameDamage(i, int(starts[i]), what) for i, what in sorted(found.bad.items())]
    # A table without columns has no rows, unless it once had a column: the numbers.
    table = pa.Table.from_arrays([pa.array(number), *arrays.values()], ["", *arrays])
    if bad:
        number = np.delete(number, [damage.record for damage in bad])
        table = table.take(pa.array(number))
    return Parsed(table.select(list(range(1, len(arrays) + 1))), number, bad)


def _together(
    data: ByteArray, starts: Positions, lengths: Positions
) -> tuple[ByteArray, Positions, Positions]:
    """Bytes that hold little but these records, in order, and where each starts and ends."""
    first, ends = int(starts[0]) if len(starts) else 0, starts + lengths
    stop = int(ends[-1]) if len(starts) else 0
    if (starts[1:] >= ends[:-1]).all() and stop - first <= 4 * lengths.sum() + _BLOCK:
        return data[first:stop], starts - first, ends - first
    parts = [data.data[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]
    offsets = offsets_of(lengths)
    return as_bytes(b"".join(parts)), offsets[:-1], offsets[1:]


# Values → columns.


def _columns(found: FoundFeatures, given: Mapping[str, FeatureType]) -> dict[str, pa.Array]:
    inferred = sorted(n for n, f in found.features.items() if n not in given and f.kind.any())
    wanted: dict[str, FeatureType | None] = {**given, **dict.fromkeys(inferred)}
    return {name: _column(found, name, kind) for name, kind in wanted.items()}


def _column(found: FoundFeatures, name: str, wanted: FeatureType | None) -> pa.Array:
    """One column of all records; where a record does not fit, it is blamed and null."""
    feature = found.features.get(name)
    if feature is None or not feature.kind.any():
        return pa.nulls(found.records, wanted)
    kinds = (np.flatnonzero(np.bincount(feature.kind, minlength=4)[1:]) + 1).tolist()
    if wanted == pa.null():
        wanted = None
    base = unify(TYPES[k] for k in kinds) if wanted is None else inner_type(wanted)
    kind = kind_of(name, base)
    for other in kinds:
        if other != kind:
            what = f"feature '{name}' holds {_NAMES[other]}; {_NAMES[kind]} are expected"
            _blame(found.bad, np.flatnonzero(feature.kind == other), what)
    rows = np.flatnonzero(feature.kind == kind)
    values, counts, whole = _DECODERS[kind](found.data, feature, rows)
    _blame(found.cut, rows[~whole], f"feature '{name}': {CUT.get(kind)}")
    inferred = wanted is None
    if wanted is None:
        listed = name in found.lists
        wanted = pa.list_(base) if listed else _shape(base, kind, counts[whole])
    shape = wanted
    if inferred or inner_type(shape) == shape:  # no value: it is missing, however records are cut
        there = ~whole | (counts > 0)
        rows, counts, whole = rows[there], counts[there], whole[there]
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


def _shape(base: FeatureType, kind: int, counts: Positions) -> FeatureType:
    """One value, a fixed number of them or a list, by how many there always are, if any."""
    counts = counts[counts > 0]
    least, most = (int(counts.min()), int(counts.max())) if counts.size else (1, 1)
    if most == 1:
        return base
    return pa.list_(base, most if least == most and kind != BYTES else -1)


def _fits(shape: FeatureType, counts: Positions) -> NDArray[np.bool_]:
    if pa.types.is_fixed_size_list(shape):
        return counts == shape.list_size
    return counts == 1 if inner_type(shape) == shape else np.ones(len(counts), dtype=np.bool_)


def _in_lists(shape: FeatureType, values: pa.Array, counts: Positions) -> pa.Array:
    if pa.types.is_fixed_size_list(shape):
        return pa.FixedSizeListArray.from_arrays(values, shape.list_size)
    if inner_type(shape) == shape:
        return values
    return pa.ListArray.from_arrays(pa.array(offsets_of(counts).astype(np.int32)), values)


def _cast(found: FoundFeatures, name: str, array: pa.Array, kind: FeatureType) -> pa.Array:
    if array.type == kind:
        return array
    try:
        return array.cast(kind)
    except pa.ArrowInvalid:
        fits = np.array([_casts(array[i : i + 1], kind) for i in range(len(array))])
        what = f"feature '{name}' does not fit its column, {kind}"
        _blame(found.bad, np.flatnonzero(~fits), what)
        return array.take(pa.array(np.arange(len(array)), mask=~fits)).cast(kind)


def _casts(array: pa.Array, kind: FeatureType) -> bool:
    try:
        array.cast(kind)
    except pa.ArrowInvalid:
        return False
    return True


_Decoded = tuple[pa.Array, Positions, NDArray[np.bool_]]
"""All values end to end, how many each row has, and which rows are whole (the others have none)."""


def _bytes(data: ByteArray, feature: Feature, rows: Positions) -> _Decoded:
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


def _floats(data: ByteArray, feature: Feature, rows: Positions) -> _Decoded:
    whole = feature.size[rows] % 4 == 0
    size = np.where(whole, feature.size[rows], 0)
    raw, _ = contents(gather(data, feature.at[rows], size))
    return pa.array(raw.view("<f4")), size // 4, whole


def _ints(data: ByteArray, feature: Feature, rows: Positions) -> _Decoded:
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
    data: ByteArray, at: Positions, size: Positions, whole: NDArray[np.bool_]
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


_DECODERS: dict[int, Callable[[ByteArray, Feature, Positions], _Decoded]] = {
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


def _decode(raw: ByteArray, begins: Positions, width: Positions) -> NDArray[np.int64]:
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
