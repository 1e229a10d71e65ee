# SPDX-License-Identifier: Apache-2.0
"""Shards as files: Arrow (an IPC file of one record batch), and for other tools Parquet and
TFRecord files of tf.train.Example.

Files appear whole, under their name, or not at all. Invariant: the same table gives the same bytes,
of Arrow whatever its chunks and metadata were.
"""

import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
from pyarrow import parquet

from manyhands.data.columns.arrays import whole
from manyhands.data.columns.schema import Schema, name_of, type_of
from manyhands.data.shards.damaged_blocks import checksums_of_file
from manyhands.data.shards.manifest import ShardInfo
from manyhands.data.tfrecord import framing, parse_examples, write_examples
from manyhands.values.errors import DataDamaged, DataError
from manyhands.values.run_folder import sync_folder

ShardCompression = Literal["lz4", "zstd"]


def write_arrow(
    path: Path, table: pa.Table, *, compression: ShardCompression | None = None
) -> ShardInfo:
    table = _canonical(table, path)
    options = pa.ipc.IpcWriteOptions(compression=compression, use_threads=False)
    with (
        _draft(path) as draft,
        pa.OSFile(str(draft), "wb") as file,
        pa.ipc.new_file(file, table.schema, options=options) as writer,
    ):
        writer.write_table(table)
    return describe_shard(path, table.num_rows)


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
            joined = whole(column.cast(kind))
        except pa.ArrowInvalid as error:
            raise DataError(f"{path.name}: column '{name}' cannot be written: {error}") from error
        if pa.types.is_boolean(kind):  # the bits behind the last one may be anything
            joined = pa.array(joined.to_numpy(zero_copy_only=False))
        columns[name] = joined
    return pa.table(columns)


def write_parquet(
    path: Path, table: pa.Table, *, compression: ShardCompression | None = None
) -> ShardInfo:
    with _draft(path) as draft:
        parquet.write_table(
            table.replace_schema_metadata(None),
            str(draft),
            compression=compression or "none",
            write_page_checksum=True,
        )
    return describe_shard(path, table.num_rows)


ROWS = 8192
"""Records that are encoded at once."""


def write_tfrecord(
    path: Path, table: pa.Table, *, compression: ShardCompression | None = None
) -> ShardInfo:
    if compression is not None:
        raise DataError(
            "TFRecords are written as they are: TensorFlow reads neither lz4 nor zstd. Leave "
            "--compression out, or use --format arrow."
        )
    with _draft(path) as draft, draft.open("wb") as file:
        for start in range(0, table.num_rows, ROWS):
            payload, starts, lengths = write_examples.encode(table.slice(start, ROWS))
            framing.frame(payload, starts, lengths).tofile(file)
    return describe_shard(path, table.num_rows)


def read_table(path: Path, schema: Schema = ()) -> pa.Table:
    """All records of a shard of any format."""
    if path.suffix == ".arrow":
        with pa.memory_map(str(path)) as file:
            return pa.ipc.open_file(file).read_all()
    if path.suffix == ".parquet":
        return parquet.read_table(str(path), use_threads=False)
    return parse_tfrecord(path.read_bytes(), path, schema)


def parse_tfrecord(data: bytes | memoryview, path: Path, schema: Schema = ()) -> pa.Table:
    """The records of a TFRecord file, every checksum compared."""
    starts, lengths, damage = framing.index(data)
    if damage is not None:
        raise DataDamaged(f"{path}, record {damage.record + 1:,}: {damage.what}")
    if len(wrong := framing.check(data, starts, lengths)):
        raise DataDamaged(f"{path}, record {int(wrong[0]) + 1:,}: its checksum is wrong")
    kinds = {column.name: type_of(column.type) for column in schema}
    parsed = parse_examples.parse(data, starts, lengths, kinds or None)
    if parsed.bad:
        first = parsed.bad[0]
        raise DataDamaged(f"{path}, record {first.record + 1:,}: {first.what}")
    return parsed.table


def describe_shard(path: Path, rows: int) -> ShardInfo:
    """What the manifest says of a shard, of any format."""
    checksums = list(checksums_of_file(path))
    return ShardInfo(path.name, rows, path.stat().st_size, checksums)


@contextmanager
def _draft(path: Path) -> Generator[Path]:
    """A file to write to, which gets its name when all is written."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    try:
        yield draft
        _publish(draft, path)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise


def _publish(draft: Path, path: Path) -> None:
    """Give a finished draft its name, so that it survives a crash from now on."""
    with draft.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(draft, path)
    sync_folder(path.parent)
