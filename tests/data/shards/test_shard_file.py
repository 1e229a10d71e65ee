"""Shards: the same bytes for the same rows, views without copies, and damage that is placed."""

import pickle
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.data.columns.schema import Column
from manyhands.data.ordering.epoch_order import order
from manyhands.data.ordering.shuffle_windows import ShardOrder
from manyhands.data.shards.damaged_blocks import check_blocks
from manyhands.data.shards.manifest import BLOCK_BYTES, ShardInfo
from manyhands.data.shards.shard_columns import Ragged
from manyhands.data.shards.shard_file import open_shard
from manyhands.data.shards.shard_formats import write_arrow
from manyhands.values.errors import DataDamaged, DataError
from tests.support.prepared_folders import fixed, mixed_table

# ---- order over shards

SIZES = st.lists(st.integers(0, 40), min_size=1, max_size=30)


@given(sizes=SIZES, window=st.integers(1, 200), seed=st.integers(0, 2**62), epoch=st.integers(0, 9))
def test_an_epoch_over_shards_visits_every_record_once(
    sizes: list[int], window: int, seed: int, epoch: int
) -> None:
    here = ShardOrder(seed, epoch, sizes, window)
    assert sorted(here[range(sum(sizes))].tolist()) == list(range(sum(sizes)))
    assert sorted(s for shards in here.windows.shards for s in shards) == list(range(len(sizes)))


@given(sizes=SIZES, window=st.integers(1, 200), data=st.data())
def test_what_stands_at_a_position_does_not_depend_on_what_is_asked_with_it(
    sizes: list[int], window: int, data: st.DataObject
) -> None:
    size = sum(sizes)
    here = ShardOrder(5, 1, sizes, window)
    whole = here[range(size)]
    cuts = sorted(data.draw(st.lists(st.integers(0, size), max_size=5)))
    pieces = [here[range(a, b)] for a, b in zip([0, *cuts], [*cuts, size], strict=True)]
    assert np.concatenate(pieces).tolist() == whole.tolist()
    if size:
        some = data.draw(st.lists(st.integers(0, size - 1), max_size=9))
        assert here[np.asarray(some, dtype=np.int64)].tolist() == [whole[i] for i in some]


@given(sizes=SIZES, window=st.integers(1, 200))
def test_a_window_is_a_few_whole_shards_with_enough_records(sizes: list[int], window: int) -> None:
    here = ShardOrder(5, 1, sizes, window)
    bounds = np.concatenate([[0], np.cumsum(sizes)])
    at = 0
    for shards in here.windows.shards:
        held = sum(sizes[s] for s in shards)
        assert held >= window or len(here.windows.shards) == 1
        found = np.searchsorted(bounds, here[range(at, at + held)], side="right") - 1
        assert set(found.tolist()) <= set(shards)
        at += held
    assert at == sum(sizes)


def test_what_fits_in_one_window_is_ordered_as_if_there_were_no_shards() -> None:
    expected = order(3, 2, 100)[range(100)].tolist()
    for sizes in ([100], [30, 70], [0, 10, 0, 90]):
        assert ShardOrder(3, 2, sizes, 60)[range(100)].tolist() == expected


def test_shards_are_read_in_another_order_in_every_epoch() -> None:
    firsts = {ShardOrder(3, epoch, [10] * 50, 10).windows.shards[0][0] for epoch in range(20)}
    assert len(firsts) > 10


def test_the_order_over_shards_never_changes_between_releases() -> None:
    found = ShardOrder(1, 0, [3, 4, 5], 3)[range(12)].tolist()
    assert found == [4, 3, 5, 6, 9, 11, 10, 8, 7, 1, 2, 0]


# ---- writing and opening


def test_a_shard_is_read_as_it_was_written(tmp_path: Path) -> None:
    table = mixed_table(50)
    for compression in (None, "lz4", "zstd"):
        path = tmp_path / f"{compression}.arrow"
        info = write_arrow(path, table, compression=compression)
        assert (info.rows, info.nbytes, info.file) == (50, path.stat().st_size, path.name)
        shard = open_shard(path, info, (Column("image", "uint8[12]", shape=(2, 3, 2)),))
        assert shard.rows == 50
        for name in table.column_names:
            column = shard.columns[name]
            if isinstance(column, Ragged):
                rows = [column.values[a:b].tolist() for a, b in pairs(column.offsets)]
                wanted = table[name].to_pylist()
                if name == "name":
                    wanted = [list(text.encode()) for text in wanted]
                assert rows == [list(row) for row in wanted]
            else:
                assert column.reshape(50, -1).tolist() == [
                    row if isinstance(row, list) else [row] for row in table[name].to_pylist()
                ]
        image = shard.columns["image"]
        assert not isinstance(image, Ragged) and image.shape == (50, 2, 3, 2)


def pairs(offsets: Any) -> list[tuple[int, int]]:
    return list(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True))


def test_columns_are_views_into_the_mapped_file(tmp_path: Path) -> None:
    info = write_arrow(tmp_path / "s.arrow", mixed_table(50))
    shard = open_shard(tmp_path / "s.arrow", info)
    for name in ("_id", "age", "x", "image"):
        column = shard.columns[name]
        assert not isinstance(column, Ragged)
        assert not column.flags.owndata and not column.flags.writeable
    tokens = shard.columns["tokens"]
    assert isinstance(tokens, Ragged) and not tokens.values.flags.owndata


def test_rows_of_equal_length_are_recognised(tmp_path: Path) -> None:
    info = write_arrow(tmp_path / "s.arrow", mixed_table(50, equal=True))
    columns = open_shard(tmp_path / "s.arrow", info).columns
    tokens, blob = columns["tokens"], columns["blob"]
    assert isinstance(tokens, Ragged) and isinstance(blob, Ragged)
    assert (tokens.length, blob.length) == (3, None)


@given(cut=st.integers(0, 30))
@settings(max_examples=10)
def test_the_bytes_depend_on_the_rows_alone(cut: int, tmp_path_factory: Any) -> None:
    folder = tmp_path_factory.mktemp("bytes")
    table = mixed_table(30)
    plain = write_arrow(folder / "plain.arrow", table)
    pieces = pa.concat_tables([table.slice(0, cut), table.slice(cut)])
    noted = pieces.replace_schema_metadata({"made": "on a Tuesday"})
    other = write_arrow(folder / "other.arrow", noted)
    assert (folder / "plain.arrow").read_bytes() == (folder / "other.arrow").read_bytes()
    assert plain.checksums == other.checksums


def test_a_shard_may_be_empty(tmp_path: Path) -> None:
    info = write_arrow(tmp_path / "s.arrow", mixed_table(3).slice(0, 0))
    shard = open_shard(tmp_path / "s.arrow", info)
    assert {
        len(c.offsets) - 1 if isinstance(c, Ragged) else len(c) for c in shard.columns.values()
    } == {0}


def test_missing_values_are_refused(tmp_path: Path) -> None:
    for values in ([1, None], [[1, None], [2, 3]]):
        with pytest.raises(DataError, match=r"'x' has 1 missing values"):
            write_arrow(tmp_path / "s.arrow", pa.table({"x": values}))
    assert list(tmp_path.iterdir()) == []


# ---- damage


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
