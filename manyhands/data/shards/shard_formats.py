# SPDX-License-Identifier: Apache-2.0
"""Shards for other tools: Parquet, and TFRecord files of tf.train.Example.

The same table gives the same bytes, and files appear whole, as with Arrow shards.
"""

import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow as pa
from pyarrow import parquet

from manyhands.data.columns.schema import Schema, type_of
from manyhands.data.shards.manifest import ShardInfo
from manyhands.data.shards.shard_file import ShardCompression, describe_shard, publish
from manyhands.data.tfrecord import framing, parse_examples, write_examples
from manyhands.values.errors import DataDamaged, DataError


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


@contextmanager
def _draft(path: Path) -> Generator[Path]:
    """A file to write to, which gets its name when all is written."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    try:
        yield draft
        publish(draft, path)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise
