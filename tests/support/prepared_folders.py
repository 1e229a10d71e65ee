"""Prepared folders, made straight from tables."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from manyhands.data.columns.schema import Column, name_of
from manyhands.data.shards.manifest import Manifest, ShardInfo, SplitInfo, write_manifest
from manyhands.data.shards.shard_formats import write_arrow, write_parquet, write_tfrecord


def mixed_table(rows: int, first: int = 0, equal: bool = False) -> pa.Table:
    """One column of every kind. Everything in a row follows from its `_id`."""
    ids = np.arange(first, first + rows)
    lengths = [3 if equal else int(i * 7 % 5) for i in ids]
    tokens = [[int(i) * 10 + k for k in range(n)] for i, n in zip(ids, lengths, strict=True)]
    image = (ids[:, None] + np.arange(12)).astype(np.uint8)
    return pa.table(
        {
            "_id": pa.array(ids),
            "age": pa.array(ids.astype(np.float32) / 2),
            "count": pa.array(ids.astype(np.int32)),
            "sure": pa.array(ids % 3 == 0),
            "level": pa.array((ids % 256).astype(np.uint8)),
            "x": fixed(np.stack([ids, ids + 0.5], axis=1).astype(np.float32)),
            "image": fixed(image),
            "tokens": pa.array(tokens, pa.list_(pa.int32())),
            "weights": pa.array([[t / 4 for t in row] for row in tokens], pa.list_(pa.float32())),
            "blob": pa.array([bytes(row_bytes(int(i))) for i in ids], pa.binary()),
            "name": pa.array([f"né {i}" for i in ids]),
        }
    )


def row_bytes(i: int) -> list[int]:
    return [(i + k) % 256 for k in range(i * 13 % 40)]


def fixed(matrix: Any) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(pa.array(matrix.reshape(-1)), matrix.shape[1])


def write_folder(
    folder: Path,
    splits: Mapping[str, Sequence[pa.Table]],
    *,
    compression: Any = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    format: str = "arrow",
) -> Path:
    """A prepared folder with these tables as shards."""
    folder.mkdir(parents=True, exist_ok=True)
    infos: dict[str, SplitInfo] = {}
    for split, tables in splits.items():
        shards = [
            _write(folder / f"{split}-{i:05d}.{format}", table, compression)
            for i, table in enumerate(tables)
        ]
        rows = sum(shard.rows for shard in shards)
        infos[split] = SplitInfo(rows, sum(shard.nbytes for shard in shards), shards)
    first = next(iter(splits.values()))[0]
    schema = tuple(
        Column(field.name, name_of(field.type), shape=(shapes or {}).get(field.name, ()))
        for field in first.schema
    )
    manifest = Manifest(version=1, format=format, seed=0, schema=schema, splits=infos)
    write_manifest(folder, manifest)
    return folder


def _write(path: Path, table: pa.Table, compression: Any) -> ShardInfo:
    write = {".arrow": write_arrow, ".parquet": write_parquet, ".tfrecord": write_tfrecord}
    return write[path.suffix](path, table, compression=compression)
