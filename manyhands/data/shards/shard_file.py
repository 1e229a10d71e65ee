# SPDX-License-Identifier: Apache-2.0
"""A shard, opened: checked block by block, its columns numpy views into the mapped file.

An Arrow shard that is not compressed is not copied. What is read is what was written: where it is
not, file, bytes and rows are named.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from manyhands.data.columns.array_types import AnyArray
from manyhands.data.columns.schema import MANIFEST, Schema
from manyhands.data.shards.damaged_blocks import check_blocks, checksums_of, mapped
from manyhands.data.shards.manifest import ShardInfo
from manyhands.data.shards.shard_columns import Ragged, columns_of
from manyhands.values.errors import DataDamaged
from manyhands.values.shell_commands import command_line


@dataclass(frozen=True, slots=True)
class OpenShard:
    """Views into a shard. What they look at stays open as long as one of them is held."""

    rows: int
    columns: Mapping[str, AnyArray | Ragged]
    """Numbers: (rows,); fixed lists: (rows, *shape); lists, bytes and strings: `Ragged`."""


def open_shard(
    path: Path, info: ShardInfo, schema: Schema = (), *, verify: bool = True
) -> OpenShard:
    """The columns of a shard, after comparing every block with the manifest."""
    try:
        if not path.exists() or path.stat().st_size != info.nbytes:
            raise DataDamaged(_sentence(path, check_blocks(path, info)))
        file = mapped(path)
        if verify and checksums_of(memoryview(file)) != info.checksums:
            raise DataDamaged(_sentence(path, check_blocks(path, info)))
        table = _table(file, path, schema)
        if table.num_rows != info.rows:
            raise DataDamaged(
                f"{path} has {table.num_rows:,} records, and {MANIFEST} beside it says "
                f"{info.rows:,}: the manifest was changed. Take the one that was written with the "
                "shards, or prepare the data again."
            )
        return OpenShard(info.rows, columns_of(table, schema))
    except (OSError, pa.ArrowException) as error:
        raise DataDamaged(_sentence(path, [f"it cannot be read: {error}"])) from error


def _table(file: Any, path: Path, schema: Schema) -> pa.Table:
    """Arrow is read where it lies; other formats are decoded, in memory."""
    if path.suffix == ".arrow":
        return pa.ipc.open_file(pa.BufferReader(file)).read_all()
    # Parquet and TFRecord are not needed by others.
    from manyhands.data.shards.shard_formats import parquet, parse_tfrecord

    if path.suffix == ".parquet":
        return parquet.read_table(pa.BufferReader(file), use_threads=False)
    return parse_tfrecord(memoryview(file), path, schema)


def _sentence(path: Path, found: Sequence[object]) -> str:
    shown = "; ".join(str(damage) for damage in found[:3])
    more = f"; and {len(found) - 3} more places" if len(found) > 3 else ""
    return (
        f"{path} is damaged. {shown}{more}. Look at the whole data set with: "
        f"{command_line('data', path.parent, '--verify')}; then copy this file again from where "
        "it came, or prepare the data again."
    )
