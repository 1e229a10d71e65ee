# SPDX-License-Identifier: Apache-2.0
"""Shards: files of encoded records, written whole, checked block by block, opened without copying.

An Arrow shard is an IPC file of one record batch. Uncompressed, its columns are numpy views into
the mapped file. The manifest holds a checksum of every block of 1 MiB; opening a shard compares
them, so that what is read is what was written, and names file, bytes and rows where it is not.
`check_blocks` reads the file instead of mapping it: a disk error is then an error to catch.

Invariant: the same table gives the same bytes, whatever its chunks and metadata were.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import xxhash

from manyhands.data.columns.array_types import AnyArray
from manyhands.data.columns.schema import Schema, name_of, type_of
from manyhands.data.shards.manifest import BLOCK_BYTES, ShardInfo
from manyhands.values.errors import DataDamaged, DataError
from manyhands.values.rundir import sync_folder

ShardCompression = Literal["lz4", "zstd"]


class Ragged(NamedTuple):
    """Rows of different lengths, one after the other: row i is values[offsets[i]:offsets[i+1]]."""

    offsets: AnyArray
    values: AnyArray
    length: int | None
    """The length of every row, where it is the same and rows follow each other from 0."""


@dataclass(frozen=True, slots=True)
class OpenShard:
    """Views into a shard. What they look at stays open as long as one of them is held."""

    rows: int
    columns: Mapping[str, AnyArray | Ragged]
    """Numbers: (rows,); fixed lists: (rows, *shape); lists, bytes and strings: `Ragged`."""


# ---- writing


def write_shard(
    path: Path, table: pa.Table, *, compression: ShardCompression | None = None
) -> ShardInfo:
    """Write a shard. It appears whole, under its name, or not at all."""
    table = _canonical(table, path)
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    options = pa.ipc.IpcWriteOptions(compression=compression, use_threads=False)
    try:
        with (
            pa.OSFile(str(draft), "wb") as file,
            pa.ipc.new_file(file, table.schema, options=options) as writer,
        ):
            writer.write_table(table)
        publish(draft, path)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise
    return describe_shard(path, table.num_rows)


def publish(draft: Path, path: Path) -> None:
    """Give a finished draft its name, so that it survives a crash from now on."""
    with draft.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(draft, path)
    sync_folder(path.parent)


def describe_shard(path: Path, rows: int) -> ShardInfo:
    """What the manifest says of a shard, of any format."""
    checksums = list(_checksums(path))
    return ShardInfo(path.name, rows, path.stat().st_size, checksums)


def _canonical(table: pa.Table, path: Path) -> pa.Table:
    """The same rows in plain types and single chunks, without names of items and notes."""
    columns: dict[str, Any] = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        kind = type_of(name_of(column.type))
        missing = column.null_count
        if pa.types.is_nested(kind):
            missing += sum(chunk.flatten().null_count for chunk in column.chunks)
        if missing:
            raise DataError(
                f"{path.name}: column '{name}' has {missing:,} missing values and a shard holds "
                "none; encode them first."
            )
        try:
            joined = _one_chunk(column.cast(kind))
        except pa.ArrowInvalid as error:
            raise DataError(f"{path.name}: column '{name}' cannot be written: {error}") from error
        if pa.types.is_boolean(kind):  # the bits behind the last one may be anything
            joined = pa.array(joined.to_numpy(zero_copy_only=False))
        columns[name] = joined
    return pa.table(columns)


def _one_chunk(column: Any) -> Any:
    if column.num_chunks == 1:
        return column.chunk(0)
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


# ---- opening


def open_shard(
    path: Path, info: ShardInfo, schema: Schema = (), *, verify: bool = True
) -> OpenShard:
    """The columns of a shard, after comparing every block with the manifest."""
    try:
        if not path.exists() or path.stat().st_size != info.nbytes:
            raise DataDamaged(_sentence(path, check_blocks(path, info)))
        file = _mapped(path)
        if verify and _checksums_of(memoryview(file)) != info.checksums:
            raise DataDamaged(_sentence(path, check_blocks(path, info)))
        return OpenShard(info.rows, columns_of(_table(file, path, schema), schema))
    except (OSError, pa.ArrowException) as error:
        raise DataDamaged(_sentence(path, [f"it cannot be read: {error}"])) from error


def _table(file: Any, path: Path, schema: Schema) -> pa.Table:
    """Arrow is read where it lies; other formats are decoded, in memory."""
    if path.suffix == ".arrow":
        return pa.ipc.open_file(pa.BufferReader(file)).read_all()
    from manyhands.data.shards.shard_formats import (  # which write by means of this file
        parquet,
        parse_tfrecord,
    )

    if path.suffix == ".parquet":
        return parquet.read_table(pa.BufferReader(file), use_threads=False)
    return parse_tfrecord(memoryview(file), path, schema)


def _checksums_of(file: memoryview) -> list[str]:
    starts = range(0, len(file), BLOCK_BYTES)
    return [xxhash.xxh3_64_hexdigest(file[a : a + BLOCK_BYTES]) for a in starts]


def _mapped(path: Path) -> Any:
    """The whole file; it stays mapped as long as anything looks at it."""
    with pa.memory_map(str(path)) as file:
        return file.read_buffer()


def columns_of(table: pa.Table, schema: Schema = ()) -> dict[str, AnyArray | Ragged]:
    """A table's columns as numpy arrays, without copying where there is one chunk."""
    shapes = {column.name: column.shape for column in schema}
    columns: dict[str, AnyArray | Ragged] = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        views = _views(name, _one_chunk(column))
        shape = shapes.get(name, ())
        if shape and not isinstance(views, Ragged):
            views = views.reshape(len(views), *shape)
        columns[name] = views
    return columns


def _views(name: str, array: Any) -> AnyArray | Ragged:
    kind, t = array.type, pa.types
    if t.is_boolean(kind):
        return array.to_numpy(zero_copy_only=False)  # it is stored in single bits
    if t.is_fixed_size_list(kind):
        return _views(name, array.flatten()).reshape(len(array), kind.list_size)  # pyright: ignore
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


# ---- checking


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
        for block, checksum in enumerate(_checksums(path)):
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


def _checksums(path: Path) -> Iterator[str]:
    block = bytearray(BLOCK_BYTES)
    view = memoryview(block)
    with path.open("rb", buffering=0) as file:
        while read := file.readinto(block):
            while read < BLOCK_BYTES and (more := file.readinto(view[read:])):
                read += more
            yield xxhash.xxh3_64_hexdigest(view[:read])


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
        buffer = _mapped(path)
        table = pa.ipc.open_file(pa.BufferReader(buffer)).read_all()
        found: list[_BufferPlace] = []
        for name, column in zip(table.column_names, table.columns, strict=True):
            if column.num_chunks == 1 and len(column) == info.rows:
                found += _column_places(name, column.chunk(0), buffer)
        return found
    except (OSError, pa.ArrowException, ValueError, IndexError):
        return []


def _column_places(name: str, array: Any, file: Any) -> Iterator[_BufferPlace]:
    views = _views(name, array)
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


def _sentence(path: Path, found: Sequence[object]) -> str:
    shown = "; ".join(str(damage) for damage in found[:3])
    more = f"; and {len(found) - 3} more places" if len(found) > 3 else ""
    return (
        f"{path} is damaged. {shown}{more}. Look at the whole data set with: manyhands data "
        f"{path.parent} --verify; then copy this file again from where it came, or prepare the "
        "data again."
    )
