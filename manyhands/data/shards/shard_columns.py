# SPDX-License-Identifier: Apache-2.0
"""Arrow columns of a shard as numpy arrays: views, where a column is in one chunk."""

from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from manyhands.data.columns.array_types import AnyArray
from manyhands.data.columns.arrays import whole
from manyhands.data.columns.schema import Schema
from manyhands.values.errors import DataError


class Ragged(NamedTuple):
    """Rows of different lengths, one after the other: row i is values[offsets[i]:offsets[i+1]]."""

    offsets: AnyArray
    values: AnyArray
    length: int | None
    """The length of every row, where it is the same and rows follow each other from 0."""


def columns_of(table: pa.Table, schema: Schema = ()) -> dict[str, AnyArray | Ragged]:
    """A table's columns as numpy arrays, without copying where there is one chunk."""
    shapes = {column.name: column.shape for column in schema}
    columns: dict[str, AnyArray | Ragged] = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        views = views_of(name, whole(column))
        shape = shapes.get(name, ())
        if shape and not isinstance(views, Ragged):
            views = views.reshape(len(views), *shape)
        columns[name] = views
    return columns


def views_of(name: str, array: Any) -> AnyArray | Ragged:
    kind, t = array.type, pa.types
    if t.is_boolean(kind):
        return array.to_numpy(zero_copy_only=False)  # it is stored in single bits
    if t.is_fixed_size_list(kind):
        return views_of(name, array.flatten()).reshape(len(array), kind.list_size)  # pyright: ignore
    if t.is_list(kind) or t.is_large_list(kind):
        return _ragged(array.offsets.to_numpy(), array.values.to_numpy(zero_copy_only=False))
    if t.is_string(kind) or t.is_binary(kind):
        _, offsets, values = array.buffers()
        ends = np.frombuffer(offsets, np.int32) if offsets else np.zeros(1, np.int32)
        view = np.frombuffer(values, np.uint8) if values else np.empty(0, np.uint8)
        return _ragged(ends[array.offset : array.offset + len(array) + 1], view)
    if t.is_integer(kind) or t.is_floating(kind):
        return array.to_numpy()
    raise DataError(f"column '{name}' is of type {kind}, which batches cannot hold; encode it.")


def _ragged(offsets: AnyArray, values: AnyArray) -> Ragged:
    rows = len(offsets) - 1
    length, rest = divmod(len(values), max(1, rows))
    same = rest == 0 and np.array_equal(offsets, np.arange(rows + 1) * length)
    return Ragged(offsets, values, length if same else None)
