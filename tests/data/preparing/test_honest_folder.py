"""What is said of prepared data is so: counts, infinities, places that cannot be written to."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

import manyhands as mh
from manyhands.data.preparing.overview import verified
from manyhands.data.preparing.work_folder import work_folder
from manyhands.data.shards.manifest import read_manifest
from manyhands.data.shards.shard_file import open_shard
from manyhands.values.errors import DataDamaged, DataError


def made_data(tmp_path: Path, **how: Any) -> Path:
    rows = [f"{'inf' if i % 40 == 3 else i % 17},{i % 3}" for i in range(300)]
    (tmp_path / "rows.csv").write_text("x,y\n" + "\n".join(rows) + "\n")
    mh.prepare([tmp_path / "rows.csv"], tmp_path / "data", label="y", workers=1, **how)
    return tmp_path / "data"


def edit(folder: Path, change: Any) -> None:
    said = json.loads((folder / "manifest.json").read_text())
    change(said["splits"]["train"])
    (folder / "manifest.json").write_text(json.dumps(said))


@pytest.mark.parametrize("format", ["arrow", "parquet", "tfrecord"])
def test_edited_counts_are_found_and_a_shard_of_other_rows_is_not_read(
    tmp_path: Path, format: str
) -> None:
    folder = made_data(tmp_path, format=format)
    assert not verified(folder)

    def more(split: Any) -> None:
        split["shards"][0]["rows"] += 5
        split["rows"] += 5

    edit(folder, more)
    found = "\n".join(verified(folder))
    assert "manifest.json says" in found and "split 'train' has" in found
    manifest = read_manifest(folder)
    shard = manifest.splits["train"].shards[0]
    with pytest.raises(DataDamaged, match=r"train-00000\.\w+ has .* manifest\.json beside it says"):
        open_shard(folder / shard.file, shard, manifest.schema)


def test_edited_labels_are_found(tmp_path: Path) -> None:
    folder = made_data(tmp_path)

    def fewer(split: Any) -> None:
        split["labels"]["0"] = 1

    edit(folder, fewer)
    (found,) = verified(folder)
    assert "other counts of labels" in found


def test_infinite_numbers_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = made_data(tmp_path, split="none", quiet=False)
    said = " ".join(capsys.readouterr().err.split())
    assert "column 'x': 8 numbers of training records are infinite" in said
    assert read_manifest(folder).statistics["x"]["infinite"] == 8


@pytest.mark.parametrize("to", ["s3://bucket/out", Path("s3://bucket/out"), "memory://out"])
def test_a_url_is_no_folder_to_write_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(mh.RequestError, match="can be written to folders only"):
        mh.prepare([{"x": 1}], to, workers=1)
    assert os.listdir(tmp_path) == []


def test_who_is_refused_leaves_the_others_lock(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    with work_folder(folder, restart=False) as work:
        with (
            pytest.raises(DataError, match="another process is preparing"),
            work_folder(folder, restart=False),
        ):
            raise AssertionError("two at once")
        assert (work / ".lock").exists()
    assert not folder.exists()
