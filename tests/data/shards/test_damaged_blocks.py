"""Damage of a shard: found wherever it is, and placed: file, bytes, columns, rows."""

import pickle
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.data.shards.damaged_blocks import check_blocks
from manyhands.data.shards.manifest import BLOCK_BYTES, ShardInfo
from manyhands.data.shards.shard_columns import Ragged
from manyhands.data.shards.shard_file import open_shard
from manyhands.data.shards.shard_formats import write_arrow
from manyhands.values.errors import DataDamaged
from tests.support.prepared_folders import fixed


def large(tmp_path: Path, compression: Any = None) -> tuple[Path, ShardInfo]:
    """Three and a half blocks: numbers first, then tokens."""
    ids = np.arange(60_000)
    table = pa.table(
        {
            "_id": pa.array(ids),
            "x": fixed(np.stack([ids] * 8, axis=1).astype(np.float32)),
            "tokens": pa.array([[int(i)] * int(i % 8) for i in ids], pa.list_(pa.int32())),
        }
    )
    path = tmp_path / "train-00000.arrow"
    return path, write_arrow(path, table, compression=compression)


def flip(path: Path, byte: int) -> None:
    with path.open("r+b") as file:
        file.seek(byte)
        old = file.read(1)
        file.seek(byte)
        file.write(bytes([old[0] ^ 0x10]))


def test_a_flipped_byte_is_placed(tmp_path: Path) -> None:
    path, info = large(tmp_path)
    shard = open_shard(path, info)
    x = shard.columns["x"]
    assert not isinstance(x, Ragged)
    raw = path.read_bytes()
    row = 40_000
    byte = raw.index(x[row].tobytes())
    del shard, x
    flip(path, byte)
    (damage,) = check_blocks(path, info)
    assert damage.start <= byte < damage.stop and damage.start % BLOCK_BYTES == 0
    assert row in damage.rows["x"] and len(damage.rows["x"]) <= BLOCK_BYTES // 32 + 2
    with pytest.raises(DataDamaged) as caught:
        open_shard(path, info)
    said = str(caught.value)
    assert str(path) in said and f"bytes {damage.start:,} to {damage.stop:,}" in said
    assert "'x' of rows" in said and "--verify" in said and "copy" in said
    assert str(pickle.loads(pickle.dumps(caught.value))) == said
    open_shard(path, info, verify=False)  # who asked for no check gets none


@given(place=st.floats(0, 1, exclude_max=True))
@settings(max_examples=40)
def test_any_flipped_byte_is_found(place: float, tmp_path_factory: Any) -> None:
    path, info = large(tmp_path_factory.mktemp("flip"))
    byte = int(place * info.nbytes)
    flip(path, byte)
    (damage,) = check_blocks(path, info)
    assert damage.start <= byte < damage.stop
    assert all(0 <= r.start < r.stop <= info.rows for r in damage.rows.values())
    with pytest.raises(DataDamaged, match="have changed"):
        open_shard(path, info)


def test_a_compressed_shard_is_checked_too(tmp_path: Path) -> None:
    path, info = large(tmp_path, "zstd")
    flip(path, info.nbytes // 2)
    (damage,) = check_blocks(path, info)
    assert damage.rows == {} and "any row" in str(damage)


def test_a_truncated_and_a_missing_file_are_named(tmp_path: Path) -> None:
    path, info = large(tmp_path)
    assert check_blocks(path, info) == []
    with path.open("r+b") as file:
        file.truncate(BLOCK_BYTES + 100)
    (damage,) = check_blocks(path, info)
    assert (damage.start, damage.stop) == (BLOCK_BYTES + 100, info.nbytes)
    with pytest.raises(DataDamaged, match="missing from the end"):
        open_shard(path, info, verify=False)
    path.write_bytes(b"")
    with pytest.raises(DataDamaged, match="missing from the end"):
        open_shard(path, info)
    path.unlink()
    with pytest.raises(DataDamaged, match="the file is missing"):
        open_shard(path, info)


def test_a_longer_file_is_not_what_was_written(tmp_path: Path) -> None:
    path, info = large(tmp_path)
    with path.open("ab") as file:
        file.write(b"more")
    with pytest.raises(DataDamaged, match="too many at the end"):
        open_shard(path, info)


def test_a_file_that_is_no_shard_is_named(tmp_path: Path) -> None:
    path, info = large(tmp_path)
    path.write_bytes(b"x" * info.nbytes)
    with pytest.raises(DataDamaged, match="cannot be read"):
        open_shard(path, info, verify=False)


def test_shard_infos_travel_through_the_manifest(tmp_path: Path) -> None:
    _, info = large(tmp_path)
    assert msgspec.json.decode(msgspec.json.encode(info), type=ShardInfo) == info
    assert len(info.checksums) == -(-info.nbytes // BLOCK_BYTES)
