# SPDX-License-Identifier: Apache-2.0
"""Tables one after the other as one, each column in one chunk, in little more memory than it has.

Arrow joins chunks by copying them, which takes the table twice. Here every part is added to memory
that grows in place (realloc moves pages, not bytes) and can be given up at once.
"""

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

_MOST_OFFSET = (1 << 31) - 1


class GrowingTable:
    """`add` any number of tables of one schema; `table` is all their rows, in that order."""

    def __init__(self) -> None:
        self._schema: pa.Schema | None = None
        self._columns: list[_GrowingColumn] = []

    def add(self, part: pa.Table) -> None:
        if self._schema is None:
            self._schema = part.schema
            self._columns = [_GrowingColumn(kind) for kind in part.schema.types]
        assert part.schema == self._schema, "parts of different tables"
        for growing, column in zip(self._columns, part.columns, strict=True):
            for chunk in column.chunks:
                growing.add(chunk)

    def table(self) -> pa.Table:
        assert self._schema is not None, "nothing was added"
        columns = [column.chunks() for column in self._columns]
        arrays = [
            pa.chunked_array(chunks, kind)
            for chunks, kind in zip(columns, self._schema.types, strict=True)
        ]
        return pa.Table.from_arrays(arrays, schema=self._schema)


class _GrowingColumn:
    """Numbers, lists, text and bytes without missing values grow in place. Whatever else there is,
    and columns beyond what offsets of 32 bits can count, stay chunks."""

    def __init__(self, kind: pa.DataType) -> None:
        self.kind, self.rows = kind, 0
        self.values, self.ends = bytearray(), bytearray()
        self.length = 0
        """Of the values, in what offsets count."""
        self.inner = _GrowingColumn(kind.value_type) if _is_list(kind) else None
        self.others: list[pa.Array] = []

    def add(self, array: Any) -> None:
        if not len(array):
            return
        if self.others or not self._grows(array):
            self.others.append(array)
            return
        self.rows += len(array)
        if pa.types.is_fixed_size_list(self.kind):
            assert self.inner is not None
            self.inner.add(array.flatten())
        elif self.inner is not None:
            self._add_ends(array.offsets.to_numpy())
            self.inner.add(array.flatten())
        elif _is_text(self.kind):
            _, offsets, values = array.buffers()
            ends = np.frombuffer(offsets, np.int32)[array.offset : array.offset + len(array) + 1]
            self._add_ends(ends)
            if values is not None:
                self.values += memoryview(values)[int(ends[0]) : int(ends[-1])]
        else:
            self.values += memoryview(array.to_numpy()).cast("B")

    def _add_ends(self, ends: NDArray[np.int32]) -> None:
        self.ends += memoryview(ends[1:] - ends[0] + np.int32(self.length)).cast("B")
        self.length += int(ends[-1]) - int(ends[0])

    def _grows(self, array: Any) -> bool:
        if array.null_count:
            return False
        kind = array.type
        if pa.types.is_fixed_size_list(kind):
            return _is_number(kind.value_type) and not array.flatten().null_count
        if pa.types.is_list(kind):
            inside = array.flatten()
            counted = self.length + len(inside) <= _MOST_OFFSET
            return _is_number(kind.value_type) and not inside.null_count and counted
        if _is_text(kind):
            return self.length + array.nbytes <= _MOST_OFFSET
        return _is_number(kind)

    def chunks(self) -> list[pa.Array]:
        found = [*([self._grown()] if self.rows else []), *self.others]
        return found or [pa.array([], self.kind)]

    def _grown(self) -> pa.Array:
        ends = pa.py_buffer(bytes(4) + self.ends) if self.ends else None
        values = pa.py_buffer(self.values)
        if self.inner is not None:
            inner = self.inner._grown() if self.inner.rows else pa.array([], self.kind.value_type)
            buffers = [None] if ends is None else [None, ends]
            return pa.Array.from_buffers(self.kind, self.rows, buffers, children=[inner])
        buffers = [None, values] if ends is None else [None, ends, values]
        return pa.Array.from_buffers(self.kind, self.rows, buffers)


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind)


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_binary(kind)


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind)
