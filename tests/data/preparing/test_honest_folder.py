"""What is said of prepared data is so: counts, infinities, places that cannot be written to."""

import fcntl
import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import manyhands as mh
from manyhands.data.fetching.choose_transfer import open_cache
from manyhands.data.preparing.overview import verified
from manyhands.data.preparing.work_folder import work_folder
from manyhands.data.shards.manifest import read_manifest
from manyhands.data.shards.shard_file import open_shard
from manyhands.stories.cross_validate import train_folds
from manyhands.values.config import DataConfig
from manyhands.values.errors import DataDamaged, DataError
from manyhands.values.join_token import make_token
from manyhands.values.run_options import RunRequest


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


def test_nobody_gets_in_while_the_folder_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who could lock it then would lose what it begins there."""
    folder, got_in = tmp_path / "out", list[Path]()
    remove = shutil.rmtree

    def somebody_comes(path: Path, **how: Any) -> None:
        monkeypatch.setattr(shutil, "rmtree", remove)
        with suppress(DataError), work_folder(folder, restart=False) as work:
            got_in.append(work)
        remove(path, **how)

    monkeypatch.setattr(shutil, "rmtree", somebody_comes)
    with pytest.raises(DataError, match="refused"), work_folder(folder, restart=False):
        raise DataError("refused")
    assert shutil.rmtree is remove, "the folder was to be removed"
    assert got_in == []
    assert not folder.exists()


def test_a_lock_that_was_removed_is_nobodys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opened while it was another's, and locked when that one has gone and taken it along."""
    folder, lock = tmp_path / "out", fcntl.flock

    def locked_late(file: int, how: int) -> None:
        shutil.rmtree(folder)
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", locked_late)
    with (
        pytest.raises(DataError, match="a moment ago"),
        work_folder(folder, restart=False),
    ):
        raise AssertionError("its lock is gone")


def refused_outputs(url: str, there: Path) -> dict[str, Callable[[], object]]:
    """Everything that writes where somebody says."""
    task = there / "task.py"
    task.write_text("")
    return {
        "map_reduce: to": lambda: mh.map_reduce([1], to=url, workers=1),
        "map_reduce: work": lambda: mh.map_reduce([1], work=url, workers=1),
        "--to": lambda: train_folds(RunRequest(task), Path(url), say=print),
        "the token's file": lambda: make_token(Path(url), None),
        "data.cache": lambda: open_cache(DataConfig(cache=url)),
    }


@pytest.mark.parametrize(
    "which", ["map_reduce: to", "map_reduce: work", "--to", "the token's file", "data.cache"]
)
def test_whatever_is_written_is_not_written_to_a_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    monkeypatch.chdir(tmp_path)
    call = refused_outputs("s3://bucket/out", tmp_path)[which]
    with pytest.raises(mh.RequestError, match=rf"^{which} names a place behind s3://"):
        call()
    assert os.listdir(tmp_path) == ["task.py"]


@pytest.mark.parametrize("beside", [1, 0.5, True, "2024-01-02T10:00:00", [1, 2]])
@pytest.mark.parametrize("how", ["python", "json", "json read exactly"])
def test_a_word_for_nothing_changes_no_type(tmp_path: Path, beside: Any, how: str) -> None:
    """In JSON and Python as in CSV."""
    words = ["?", " NA ", "null"]
    rows = [{"x": words[i // 9 % 3] if i % 9 == 0 else beside, "y": i % 2} for i in range(200)]
    sources: Any = rows
    if how != "python":
        lines = [json.dumps(row) for row in rows]
        if how == "json read exactly":
            lines[0] = lines[0].replace('"y": 0', '"y": 0, "z": 12345678901234567890123')
        (tmp_path / "rows.jsonl").write_text("\n".join(lines))
        sources = tmp_path / "rows.jsonl"
    mh.prepare(sources, tmp_path / "out", label="y", split="none", workers=1)
    types = {c.name: c.type for c in read_manifest(tmp_path / "out").raw}
    text = "string" if how == "python" else "time"  # whose values have types already
    kinds = {int: "int64", float: "float64", bool: "bool", str: text, list: "list<int64>"}
    assert types["x"] == kinds[type(beside)]


def test_what_was_refused_can_be_asked_for_otherwise(tmp_path: Path) -> None:
    """Records that Python makes are written down before the rest of the old work is forgotten."""
    rows = [{"n": i, "when": "03/04/2024", "y": i % 2} for i in range(50)]
    for kind in ("int", "time"):
        with pytest.raises(DataError):
            mh.prepare(rows, tmp_path / "out", label="y", workers=1, types={"when": kind})
    mh.prepare(rows, tmp_path / "out", label="y", workers=1, types={"when": "time:dmy"})
    assert not (tmp_path / "out" / ".work").exists()
