# SPDX-License-Identifier: Apache-2.0
"""How many rows the record batches of an Arrow stream have, without reading the batches.

pyarrow tells the rows of a batch only after reading it, and of a compressed one after unpacking it.
The number stands at a fixed place in the header of its message, which is a flatbuffer.
"""

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

_MOST_ROWS = 1 << 40


def record_batches(source: Any) -> Iterator[tuple[int, int]]:
    """Rows and stored bytes of each batch from here on. Of a mapped file only headers are read."""
    try:
        for message in pa.ipc.MessageReader.open_stream(source):
            if message.type == "record batch":
                yield rows_of(message.metadata.to_pybytes()), message.body.size
    except (pa.ArrowInvalid, OSError):  # old files have no mark where the list at the end begins
        return


def rows_of(metadata: bytes) -> int:
    """The length of the record batch in a message: field 0 of the table in field 2 of the root."""
    header = _field(metadata, _target(metadata, 0), 2)
    length = _field(metadata, _target(metadata, header), 0) if header else 0
    rows = _number(metadata, length, 8) if length else 0
    if not 0 <= rows < _MOST_ROWS:
        raise ValueError(f"a record batch has {rows:,} rows")
    return rows


def _field(data: bytes, table: int, number: int) -> int:
    """Where a field of a table is; 0 if it is not there."""
    vtable = table - _number(data, table, 4)
    entry = vtable + 4 + 2 * number
    there = _number(data, entry, 2) if entry < vtable + _number(data, vtable, 2) else 0
    return table + there if there else 0


def _target(data: bytes, at: int) -> int:
    return at + _number(data, at, 4)


def _number(data: bytes, at: int, size: int) -> int:
    return int.from_bytes(data[max(0, at) : max(0, at) + size], "little", signed=True)
