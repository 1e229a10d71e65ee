"""Shards: the same bytes for the same rows, views without copies, and damage that is placed."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.data.columns.schema import Column
from manyhands.data.shards.shard_columns import Ragged
from manyhands.data.shards.shard_file import open_shard
from manyhands.data.shards.shard_formats import write_arrow
from manyhands.values.errors import DataError
from tests.support.prepared_folders import mixed_table

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
