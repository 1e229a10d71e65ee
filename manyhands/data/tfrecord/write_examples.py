# SPDX-License-Identifier: Apache-2.0
"""tf.train.Example, thousands at a time: an Arrow table → records.

Each column becomes two: the headers of its feature and the values, in all rows. A record is a row
of these, end to end.
"""

from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from manyhands.data.columns.array_types import ByteArray, Positions
from manyhands.data.tfrecord.feature_headers import header_parts
from manyhands.data.tfrecord.feature_kinds import (
    BYTES,
    FLOATS,
    MOST_BYTES,
    inner_type,
    is_list,
    kind_of,
)
from manyhands.data.tfrecord.framing import contents, joined, large_binary, offsets_of
from manyhands.data.tfrecord.parse_one_example import varint
from manyhands.values.errors import DataError


def encode(table: pa.Table) -> tuple[ByteArray, Positions, Positions]:
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
    pieces.insert(0, _by_size(size, lambda n: b"\x0a" + varint(n)))
    raw, offsets = contents(joined(pieces))
    return raw, offsets[:-1], np.diff(offsets)


def _encoded(name: str, array: pa.Array) -> list[pa.LargeBinaryArray]:
    """The headers of this feature in all rows, and its values."""
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    there = array.is_valid().to_numpy(zero_copy_only=False)
    kind = kind_of(name, inner_type(array.type))
    if is_list(array.type):
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
    headers = _by_size(size, lambda n: b"".join(header_parts(name, kind, n)) if n >= 0 else b"")
    return [headers, large_binary(raw, edges)]


def _packed(name: str, kind: int, values: pa.Array) -> tuple[ByteArray, Positions]:
    """The bytes of all values, and where each begins."""
    if kind == BYTES:
        array = values.cast(pa.large_binary())
        headers = _by_size(np.diff(contents(array)[1]), lambda n: b"\x0a" + varint(n))
        return contents(joined([headers, array]))
    if kind == FLOATS:
        with np.errstate(over="ignore"):
            floats = values.to_numpy(zero_copy_only=False).astype("<f4")
        return floats.view(np.uint8), np.arange(len(floats) + 1) * 4
    try:
        ints = values.cast(pa.int64()).to_numpy().view(np.uint64)
    except pa.ArrowInvalid as error:
        raise DataError(f"column '{name}' does not fit int64: {error}") from None
    most = len(varint(int(ints.max()))) if ints.size else 1
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
