# SPDX-License-Identifier: Apache-2.0
"""The external shuffle: rows of many tables → all rows in the order of their keys.

First pass: `spill` writes a table's rows to one file, grouped by (split, bucket), where a bucket is
one of n equal ranges of the 64-bit keys. Second pass: `gather` reads one group of every file and
sorts it. Each pass holds about three times what it works on: a table, then a bucket. Buckets that
belong together can be gathered one after the other (`gather_parts`), so that they take less.

Invariant: the buckets of a split, one after the other, are its rows sorted by key. Keys are
distinct, so that order does not depend on how rows were cut into tables, nor on how many buckets
there are.

A spill file is an Arrow IPC stream (any Arrow can read it) followed by an index: for each group its
place, size, rows and checksum. Only one file is open at a time, and only a group's bytes are read.
"""

import os
import struct
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from manyhands.data.mapreduce.growing_table import GrowingTable
from manyhands.values.errors import DataDamaged

KEY = "_key"
"""The column that holds the keys, in spill files and in what `gather` returns."""

LIMIT = 1 << 30
"""Columns of text and lists count in 31 bits; larger ones than this are moved in parts."""

PART_BYTES = 8 << 20
MOST_GROUPS = 1 << 14

_MAGIC = b"mhspill1"
_TAIL = struct.Struct("<8sQQQ")  # magic, bytes before the first group, splits, groups
_ENTRY = struct.Struct("<QQQQ")  # offset, bytes, rows, checksum


def buckets_for(nbytes_per_split: Iterable[int], shard_bytes: int) -> list[int]:
    """For each split, how many buckets of at most about this size."""
    return [max(1, -(-nbytes // shard_bytes)) for nbytes in nbytes_per_split]


def parts_for(buckets: int, bucket_bytes: int) -> int:
    """In how many parts a bucket is gathered: small ones, unless there were too many in a file."""
    return max(1, min(bucket_bytes // PART_BYTES, MOST_GROUPS // buckets))


def bucket_of(keys: NDArray[np.uint64], n: int) -> NDArray[np.int64]:
    """floor(key * n / 2**64), exactly: which of n equal ranges a key lies in."""
    assert 0 < n < 1 << 31
    low_bits, times = np.uint64(32), np.uint64(n)
    high, low = keys >> low_bits, keys & np.uint64(0xFFFFFFFF)
    return ((high * times + (low * times >> low_bits)) >> low_bits).astype(np.int64)


def spill(
    path: Path,
    table: pa.Table,
    splits: NDArray[np.int8],
    keys: NDArray[np.uint64],
    buckets: Sequence[int],
) -> None:
    """Write the rows, grouped. The file appears whole, also after a power cut."""
    assert len(splits) == 0 or 0 <= splits.min() <= splits.max() < len(buckets)
    bases = np.concatenate(([0], np.cumsum(buckets, dtype=np.int64)))
    groups = np.zeros(len(keys), dtype=np.int64)
    for split, n in enumerate(buckets):
        here = splits == split
        groups[here] = bases[split] + bucket_of(keys[here], n)
    total = int(bases[-1])
    # Stable, so that the bytes are always the same; numpy sorts 16 bits by radix.
    order = np.argsort(groups.astype(np.uint16 if total <= 1 << 16 else np.uint32), kind="stable")
    starts = np.concatenate(([0], np.cumsum(np.bincount(groups, minlength=total))))
    table = take(table.append_column(KEY, pa.array(keys, pa.uint64())), order)
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    try:
        head, places = _write_groups(draft, table, starts)
        _write_index(draft, head, places, np.diff(starts), bases)
        draft.rename(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def _write_groups(
    draft: Path, table: pa.Table, starts: NDArray[np.int64]
) -> tuple[int, NDArray[np.int64]]:
    """Where the first group begins; where each group begins, and the last one ends."""
    places: list[int] = []
    with (
        pa.OSFile(str(draft), "wb") as sink,
        pa.ipc.new_stream(sink, table.schema) as writer,
    ):
        # The schema is written with the first batch, which must therefore not be a group's.
        writer.write_batch(pa.RecordBatch.from_pylist([], table.schema))
        head = sink.tell()
        for start, stop in pairwise(starts.tolist()):
            places.append(sink.tell())
            if start < stop:
                writer.write_table(table.slice(start, stop - start))
        places.append(sink.tell())
    return head, np.array(places, dtype=np.int64)


def _write_index(
    draft: Path,
    head: int,
    places: NDArray[np.int64],
    rows: NDArray[np.int64],
    bases: NDArray[np.int64],
) -> None:
    with draft.open("r+b") as file:
        file.seek(int(places[0]))
        sizes = np.diff(places).tolist()
        sums = [_checksum(file, nbytes) for nbytes in sizes]
        entries = zip(places[:-1].tolist(), sizes, rows.tolist(), sums, strict=True)
        file.seek(0, os.SEEK_END)
        file.write(b"".join(_ENTRY.pack(*entry) for entry in entries))
        file.write(bases.astype("<u8").tobytes())
        file.write(_TAIL.pack(_MAGIC, head, len(bases) - 1, len(rows)))
        file.flush()
        os.fsync(file.fileno())


def _checksum(file: BinaryIO, nbytes: int) -> int:
    """Of the next bytes of a file."""
    digest = xxhash.xxh3_64()
    while nbytes > 0 and (part := file.read(min(nbytes, 1 << 20))):
        digest.update(part)
        nbytes -= len(part)
    return digest.intdigest()


def gather(paths: Sequence[Path], split: int, bucket: int) -> pa.Table:
    """All rows of a bucket, sorted by key, with their keys in the column `_key`."""
    head, batches = b"", list[pa.RecordBatch]()
    for path in paths:
        try:
            head, found = _read_group(path, split, bucket, head)
        except (OSError, pa.ArrowException, struct.error, ValueError, IndexError) as error:
            raise DataDamaged(
                f"{path} is not what was written: {error}. Delete the unfinished work and start "
                "again."
            ) from error
        batches += found
    assert head, "nothing to gather from"
    table = pa.Table.from_batches(batches, pa.ipc.read_schema(pa.py_buffer(head)))
    batches.clear()
    keys = table.column(KEY).to_numpy()
    order = np.argsort(keys)
    ranked = keys[order]
    assert (ranked[1:] != ranked[:-1]).all(), "two rows have the same key"
    return take(table, order)


def gather_parts(paths: Sequence[Path], split: int, bucket: int, parts: int) -> pa.Table:
    """All rows of a bucket that was spilled as so many smaller ones, sorted by key: in the memory
    that it takes by itself, and three times that of a part."""
    table = GrowingTable()
    for part in range(bucket * parts, (bucket + 1) * parts):
        table.add(gather(paths, split, part))
    return table.table()


def _read_group(
    path: Path, split: int, bucket: int, head: bytes
) -> tuple[bytes, list[pa.RecordBatch]]:
    """`head` is what a file begins with, its schema: that of the files before, if any."""
    with path.open("rb", buffering=0) as file:
        fd, size = file.fileno(), os.fstat(file.fileno()).st_size
        magic, before, splits, groups = _TAIL.unpack(_read(fd, size - _TAIL.size, _TAIL.size))
        if magic != _MAGIC:
            raise ValueError("it has no index")
        at = size - _TAIL.size - 8 * (splits + 1)
        base, after = struct.unpack("<QQ", _read(fd, at + 8 * split, 16))
        if not base <= base + bucket < after <= groups:
            raise IndexError(f"it has no bucket {bucket} of split {split}")
        at += _ENTRY.size * (base + bucket - groups)
        offset, nbytes, rows, checksum = _ENTRY.unpack(_read(fd, at, _ENTRY.size))
        ours = _read(fd, 0, before)
        if head and ours != head:
            raise ValueError("its columns are not those of the others")
        if nbytes == 0:
            return ours, []
        data = _read(fd, offset, nbytes)
    if xxhash.xxh3_64_intdigest(data) != checksum:
        raise ValueError(f"the {nbytes:,} bytes from byte {offset:,} differ")
    schema, batches = pa.ipc.read_schema(pa.py_buffer(ours)), list[pa.RecordBatch]()
    stream = pa.BufferReader(data)
    while stream.tell() < nbytes:
        batches.append(pa.ipc.read_record_batch(pa.ipc.read_message(stream), schema))
    if sum(batch.num_rows for batch in batches) != rows:
        raise ValueError(f"bucket {bucket} of split {split} does not have {rows:,} rows")
    return ours, batches


def _read(fd: int, offset: int, nbytes: int) -> bytes:
    """Exactly these bytes of a file."""
    parts: list[bytes] = []
    while nbytes > 0:
        part = os.pread(fd, nbytes, offset) if offset >= 0 else b""
        if not part:
            raise ValueError("it is too short")
        parts.append(part)
        offset, nbytes = offset + len(part), nbytes - len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def take(table: pa.Table, order: NDArray[np.int64]) -> pa.Table:
    """The rows of a table in this order; columns may be larger than Arrow can concatenate."""
    rows = pa.array(order)
    columns = [_take(column, rows) for column in table.columns]
    return pa.Table.from_arrays(columns, schema=table.schema)


def _take(column: pa.ChunkedArray, rows: pa.Array) -> pa.ChunkedArray:
    wide = _wide(column.type)
    if wide is None or column.nbytes <= LIMIT:
        return column.take(rows)
    whole = pa.concat_arrays([chunk.cast(wide) for chunk in column.chunks])
    parts = max(2, -(-2 * column.nbytes // LIMIT))
    step = -(-len(rows) // parts)
    taken: list[pa.Array] = []
    todo = [rows.slice(start, step) for start in range(0, len(rows), step)][::-1]
    while todo:
        some = todo.pop()
        part = whole.take(some)
        if part.nbytes > LIMIT and len(some) > 1:
            todo += [some.slice(len(some) // 2), some.slice(0, len(some) // 2)]
        else:
            taken.append(part.cast(column.type))
    return pa.chunked_array(taken, column.type)


def _wide(kind: pa.DataType) -> pa.DataType | None:
    """Of a kind that counts in 31 bits, the same with 63."""
    if pa.types.is_string(kind):
        return pa.large_string()
    if pa.types.is_binary(kind):
        return pa.large_binary()
    return pa.large_list(kind.value_field) if pa.types.is_list(kind) else None
