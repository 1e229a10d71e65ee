"""Packed columns: never the label, scaled as they would be by themselves, the same for new data."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import manyhands as mh
from manyhands.data.encoding.encoders import Encoders
from manyhands.data.shards.manifest import read_manifest
from manyhands.data.shards.shard_formats import read_table
from manyhands.values.errors import DataError


def measured(path: Path, count: int = 400) -> Path:
    draw = np.random.default_rng(3)
    rows = [
        {
            "x[0]": None if i % 11 == 0 else float(draw.normal(50, 9)),
            "count": int(draw.integers(0, 9000)),
            "on": bool(draw.integers(0, 2)),
            "same": 4.5,
            "user": int(draw.integers(0, 60)),
            "name": i,
            "importance": float(draw.random()),
            "target": int(draw.integers(0, 3)),
        }
        for i in range(count)
    ]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


ROLES: dict[str, Any] = {
    "label": "target",
    "id": "name",
    "group": "user",
    "roles": {"importance": "weight"},
    "split": "group=user:0.8",
    "workers": 1,
}


def rows_of(folder: Path, split: str = "train") -> pa.Table:
    manifest = read_manifest(folder)
    shards = manifest.splits[split].shards
    return pa.concat_tables([read_table(folder / s.file, manifest.schema) for s in shards])


def test_a_pattern_packs_features_alone_each_scaled_as_by_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = measured(tmp_path / "rows.jsonl")
    made = mh.prepare([source], tmp_path / "packed", pack={"features": "*"}, quiet=False, **ROLES)
    assert "same; packed columns keep their places" in " ".join(capsys.readouterr().err.split())
    roles = {c.name: c.role for c in made.schema}
    assert roles == {
        "_id": "id",
        "features": "feature",
        "user": "group",
        "name": "id",
        "importance": "weight",
        "target": "label",
    }
    mh.prepare([source], tmp_path / "plain", **ROLES)
    packed, plain = rows_of(tmp_path / "packed"), rows_of(tmp_path / "plain")
    assert packed["_id"].equals(plain["_id"]) and packed["target"].equals(plain["target"])
    stacked = np.stack(packed["features"].to_numpy())
    assert stacked.dtype == np.float32 and stacked.shape[1] == 4
    for place, name in enumerate(made.lineage["packed"]["features"]):
        alone = 0 if name == "same" else plain[name].to_numpy()
        assert (stacked[:, place] == alone).all(), name


@pytest.mark.parametrize("name", ["target", "name", "user", "importance"])
def test_naming_what_is_no_feature_is_refused(tmp_path: Path, name: str) -> None:
    source = measured(tmp_path / "rows.jsonl")
    with pytest.raises(DataError, match=f"'{name}' is the .* must not become an input"):
        mh.prepare([source], tmp_path / "out", pack={"features": f"count,{name}"}, **ROLES)


def test_a_column_is_packed_once_and_only_numbers_are(tmp_path: Path) -> None:
    source = measured(tmp_path / "rows.jsonl")
    for pack, what in (
        ({"a": "count,on", "b": "co*,same"}, "column 'count' is packed into 'a' and 'b'"),
        ({"target": "count,on"}, "a column of that name already"),
        ({"a": "tar*"}, "no column matches 'tar\\*'"),
    ):
        with pytest.raises(DataError, match=what):
            mh.prepare([source], tmp_path / "out", pack=pack, **ROLES)
    with pytest.raises(DataError, match="'count' holds string; only numbers"):
        mh.prepare([source], tmp_path / "out", pack={"a": "*"}, types={"count": "str"}, **ROLES)


def test_packed_columns_are_encoded_together_by_their_name_and_singly_by_a_pattern(
    tmp_path: Path,
) -> None:
    source = measured(tmp_path / "rows.jsonl")
    pack = {"both": "count,same"}
    mh.prepare([source], tmp_path / "raw", pack=pack, encode={"both": "raw"}, **ROLES)
    (both,) = [c for c in read_manifest(tmp_path / "raw").schema if c.name == "both"]
    assert both.type == "float32[2]"
    assert rows_of(tmp_path / "raw")["both"].to_pylist()[0][1] == 4.5
    made = mh.prepare([source], tmp_path / "each", pack=pack, encode={"*": "minmax"}, **ROLES)
    scaled = np.stack(rows_of(tmp_path / "each")["both"].to_numpy())
    assert scaled[:, 0].min() == 0 and scaled[:, 0].max() == 1 and not scaled[:, 1].any()
    assert made.encoders["target"]["kind"] == "classes"  # a pattern is about features
    with pytest.raises(DataError, match="'count' is packed into 'both', where only numbers"):
        mh.prepare([source], tmp_path / "no", pack=pack, encode={"count": "hash:9"}, **ROLES)


def test_missing_values_of_packed_columns(tmp_path: Path) -> None:
    source = measured(tmp_path / "rows.jsonl")
    pack = {"both": "x[0],count"}
    mh.prepare([source], tmp_path / "flag", pack=pack, missing={"both": "flag"}, **ROLES)
    flags = rows_of(tmp_path / "flag")["both_missing"].to_numpy()
    assert 0 < flags.sum() < len(flags) / 5
    with pytest.raises(DataError, match="column 'both': no value"):
        mh.prepare([source], tmp_path / "error", pack=pack, missing={"x[0]": "error"}, **ROLES)


def test_new_data_is_packed_alike(tmp_path: Path) -> None:
    source = measured(tmp_path / "rows.jsonl")
    options: dict[str, Any] = {**ROLES, "split": "none"}
    mh.prepare([source], tmp_path / "first", pack={"features": "*"}, **options)
    mh.prepare([source], tmp_path / "second", like=tmp_path / "first", workers=1)
    first, second = rows_of(tmp_path / "first"), rows_of(tmp_path / "second", "test")
    assert first["features"].equals(second["features"])
    encoders = Encoders.load(read_manifest(tmp_path / "first").encoders)
    row: dict[str, Any] = json.loads(source.read_text().splitlines()[1])
    given = {name: [row[name]] for name in ("x[0]", "count", "on", "same")}
    served = encoders.apply(given)["features"].to_pylist()[0]
    place = first["name"].to_pylist().index(row["name"])
    assert served == first["features"].to_pylist()[place]


def test_what_tells_records_apart_is_not_left_out(tmp_path: Path) -> None:
    source = measured(tmp_path / "rows.jsonl")
    options: dict[str, Any] = {"label": "target", "group": "user", "workers": 1}
    with pytest.raises(DataError, match="'user' is the group and is also left out"):
        mh.prepare([source], tmp_path / "out", drop=["u*"], **options)
