# SPDX-License-Identifier: Apache-2.0
"""Which blocks of a shard are not what was written, and which rows of which columns they touch.

The manifest holds a checksum of every block of 1 MiB. Files are read, not mapped: a disk error is
then an error to catch.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import xxhash

from manyhands.data.columns.array_types import AnyArray
from manyhands.data.shards.manifest import BLOCK_BYTES, ShardInfo
from manyhands.data.shards.prepared_url import blocks_of, join
from manyhands.data.shards.shard_columns import Ragged, views_of
from manyhands.values.errors import DataError


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes [start, stop) of a file that are not what was written."""

    file: str
    start: int
    stop: int
    what: str
    rows: Mapping[str, range]
    """By column, as nearly as can be told; empty where it cannot: any row may be touched."""

    def __str__(self) -> str:
        touched = "; ".join(
            f"'{name}' of rows {rows.start:,} to {rows.stop - 1:,}"
            for name, rows in self.rows.items()
        )
        place = f"{self.file}: bytes {self.start:,} to {self.stop:,}"
        return f"{place} {self.what} ({touched or 'any row'})"


def check_blocks(path: Path, info: ShardInfo) -> list[Damage]:
    """Every block of a file that is not what was written."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return [Damage(info.file, 0, info.nbytes, "are gone: the file is missing", {})]
    damages: list[Damage] = []
    places = _places(path, info) if size == info.nbytes else []
    read = 0
    try:
        for block, checksum in enumerate(checksums_of_file(path)):
            start, read = read, min(read + BLOCK_BYTES, size, info.nbytes)
            whole = read - start == min(BLOCK_BYTES, info.nbytes - start)
            if start < read and whole and checksum != info.checksums[block]:
                rows = _touched(places, start, read, info.rows)
                damages.append(Damage(info.file, start, read, "have changed", rows))
    except OSError as error:
        what = f"cannot be read ({error.strerror})"
        return [*damages, Damage(info.file, read, info.nbytes, what, {})]
    if size < info.nbytes:
        damages.append(Damage(info.file, size, info.nbytes, "are missing from the end", {}))
    if size > info.nbytes:
        damages.append(Damage(info.file, info.nbytes, size, "are too many at the end", {}))
    return damages


def checksums_of_file(path: Path) -> Iterator[str]:
    block = bytearray(BLOCK_BYTES)
    view = memoryview(block)
    with path.open("rb", buffering=0) as file:
        while read := file.readinto(block):
            while read < BLOCK_BYTES and (more := file.readinto(view[read:])):
                read += more
            yield xxhash.xxh3_64_hexdigest(view[:read])


def check_remote_blocks(url: str, info: ShardInfo) -> list[Damage]:
    """Every block of a shard in a remote folder that is not what was written. It is not kept."""
    found, read = list[Damage](), 0
    try:
        for index, block in enumerate(blocks_of(join(url, info.file), BLOCK_BYTES)):
            start, read = read, read + len(block)
            if read > info.nbytes:
                what = "and perhaps more are too many at the end"
                return [*found, Damage(info.file, info.nbytes, read, what, {})]
            whole = read - start == min(BLOCK_BYTES, info.nbytes - start)
            if whole and xxhash.xxh3_64_hexdigest(block) != info.checksums[index]:
                found.append(Damage(info.file, start, read, "have changed", {}))
    except (OSError, DataError) as error:
        return [*found, Damage(info.file, read, info.nbytes, f"cannot be read ({error})", {})]
    if read < info.nbytes:
        found.append(Damage(info.file, read, info.nbytes, "are missing from the end", {}))
    return found


def checksums_of(file: memoryview) -> list[str]:
    starts = range(0, len(file), BLOCK_BYTES)
    return [xxhash.xxh3_64_hexdigest(file[a : a + BLOCK_BYTES]) for a in starts]


def mapped(path: Path) -> Any:
    """The whole file; it stays mapped as long as anything looks at it."""
    with pa.memory_map(str(path)) as file:
        return file.read_buffer()


# ---- where columns lie in a file


class _BufferPlace(NamedTuple):
    """A buffer of a column in the file, and the rows that its elements belong to."""

    column: str
    start: int
    stop: int
    width: float
    """Bytes of an element."""
    each: int
    """Elements of a row, where that is always the same."""
    offsets: AnyArray | None
    """Else: where the rows' elements begin."""


def _places(path: Path, info: ShardInfo) -> list[_BufferPlace]:
    """Where columns lie in an Arrow file. Damage may have made it unreadable: then nowhere."""
    if path.suffix != ".arrow":
        return []
    try:
        buffer = mapped(path)
        table = pa.ipc.open_file(pa.BufferReader(buffer)).read_all()
        found: list[_BufferPlace] = []
        for name, column in zip(table.column_names, table.columns, strict=True):
            if column.num_chunks == 1 and len(column) == info.rows:
                found += _column_places(name, column.chunk(0), buffer)
        return found
    except (OSError, pa.ArrowException, ValueError, IndexError):
        return []


def _column_places(name: str, array: Any, file: Any) -> Iterator[_BufferPlace]:
    views = views_of(name, array)
    buffers = [b for b in array.buffers() if b is not None]
    for i, buffer in enumerate(buffers):
        start = buffer.address - file.address
        if not 0 <= start < file.size:
            continue  # it was compressed
        if not isinstance(views, Ragged):
            each = views.size // max(1, len(views))
            width = 1 / 8 if pa.types.is_boolean(array.type) else views.itemsize
            yield _BufferPlace(name, start, start + buffer.size, width, each, None)
        elif i == len(buffers) - 1:
            width = views.values.itemsize
            yield _BufferPlace(name, start, start + buffer.size, width, 0, views.offsets)
        else:
            yield _BufferPlace(name, start, start + buffer.size, views.offsets.itemsize, 1, None)


def _touched(places: Sequence[_BufferPlace], start: int, stop: int, total: int) -> dict[str, range]:
    """Which rows of which columns have elements in bytes [start, stop)."""
    touched: dict[str, range] = {}
    for place in places:
        first, last = max(start, place.start), min(stop, place.stop) - 1
        if first > last:
            continue
        ends = [int((byte - place.start) / place.width) for byte in (first, last)]
        if place.offsets is not None:
            rows = (np.searchsorted(place.offsets, ends, side="right") - 1).tolist()
        else:
            rows = [element // place.each for element in ends]
        a, b = (max(0, min(row, total - 1)) for row in rows)  # damaged offsets say anything
        before = touched.get(place.column, range(a, b + 1))
        touched[place.column] = range(min(a, before.start), max(b + 1, before.stop))
    return touched
