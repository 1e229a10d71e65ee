# SPDX-License-Identifier: Apache-2.0
"""Arrow columns as numpy arrays, and the questions that everybody asks of a type."""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
from numpy.typing import NDArray

compute: Any = pyarrow.compute
"""Arrow makes most of these functions while it is imported, where no type checker sees them."""


def is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def is_bytes(kind: pa.DataType) -> bool:
    """Text included."""
    t = pa.types
    return (
        is_text(kind)
        or t.is_binary(kind)
        or t.is_large_binary(kind)
        or t.is_fixed_size_binary(kind)
    )


def is_list(kind: pa.DataType) -> bool:
    t = pa.types
    return t.is_list(kind) or t.is_large_list(kind) or t.is_fixed_size_list(kind)


def is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind)


def whole(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """All chunks as one array."""
    if isinstance(column, pa.Array):
        return column
    if column.num_chunks == 1:
        return column.chunk(0)
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


def nulls(values: pa.Array) -> NDArray[np.bool_]:
    if not values.null_count:
        return np.zeros(len(values), np.bool_)
    return values.is_null().to_numpy(zero_copy_only=False)


def numbers(values: pa.Array) -> NDArray[Any]:
    """Numbers, truth values (0 and 1) and times (microseconds); 0 where there is none."""
    if pa.types.is_date(values.type) or pa.types.is_timestamp(values.type):
        values = values.cast(pa.timestamp("us"), safe=False).cast(pa.int64())
    if pa.types.is_boolean(values.type):
        values = values.cast(pa.uint8())
    if values.null_count:
        values = values.fill_null(0)
    return values.to_numpy(zero_copy_only=False)


def inner(values: pa.Array) -> tuple[pa.Array, NDArray[np.int64]]:
    """All elements of lists, and where each list begins and ends among them.

    What a missing list may hold is counted: the cuts are as they lie in memory.
    """
    if pa.types.is_fixed_size_list(values.type):
        size = values.type.list_size
        flat = values.values.slice(values.offset * size, len(values) * size)
        return flat, np.arange(len(values) + 1, dtype=np.int64) * size
    cuts = values.offsets.to_numpy().astype(np.int64)
    return values.values.slice(cuts[0], cuts[-1] - cuts[0]), cuts - cuts[0]
