"""Prepared folders behind URLs: the same records, bits and marks as from a local path."""

import dataclasses
import importlib.util
import json
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
import torch
from typer.testing import CliRunner

import manyhands as mh
from manyhands.cli.app import app
from manyhands.data.fetching import fetch_before_start
from manyhands.data.fetching.choose_transfer import open_cache
from manyhands.data.fetching.fetch_before_start import shown_when_slow
from manyhands.data.fetching.shard_cache import Cache
from manyhands.data.fetching.transfer import Direct, Peer, Replicate
from manyhands.data.open_data import make_ready, open_data
from manyhands.data.preparing.overview import overview, verified
from manyhands.data.reading.prepared_data import prepared
from manyhands.data.reading.records import sampled_digest
from manyhands.data.reading.shard_records import ShardRecords
from manyhands.data.shards.manifest import Manifest, read_manifest, write_manifest
from manyhands.data.shards.prepared_url import RemoteFolder, folder_of
from manyhands.launch.engines.launcher import Launcher
from manyhands.stories import cross_validate
from manyhands.values.config import DataConfig
from manyhands.values.errors import ConfigError, DataDamaged, DataError, RunFailed, TaskError
from manyhands.values.loaded_task import load_task
from tests.support.prepared_folders import fixed, write_folder
from tests.support.web import SECRETS, Web

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("aiohttp") is None, reason="aiohttp is not installed"
)

SHARDS, ROWS = 8, 15


def numbers(first: int, rows: int = ROWS) -> pa.Table:
    ids = np.arange(first, first + rows)
    x = np.random.default_rng(first).normal(size=(rows, 4)).astype(np.float32)
    return pa.table({"_id": ids, "x": fixed(x), "y": x.sum(axis=1)})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tables = {
        "train": [numbers(i * ROWS) for i in range(SHARDS)],
        "test": [numbers(1000), numbers(2000)],
    }
    return write_folder(tmp_path / "web" / "clicks", tables)


@pytest.fixture
def web(folder: Path) -> Iterator[Web]:
    server = Web(folder.parent)
    yield server
    server.end()


@pytest.fixture
def settings(tmp_path: Path) -> DataConfig:
    return DataConfig(cache=str(tmp_path / "cache"))


def without_secrets(text: str) -> str:
    assert not any(secret in text for secret in SECRETS), text
    return text


def regression(data: Any) -> mh.Task:
    return mh.Task(
        model=lambda: torch.nn.Linear(4, 1),
        loss=lambda model, batch: ((model(batch["x"]).squeeze(1) - batch["y"]) ** 2).mean(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.05),
        data=data,
    )


def train(data: Any, to: Path, launcher: Launcher, workers: int = 1, **options: Any) -> Any:
    settings = [
        "train.batch=16",
        "train.micro_batch=4",
        "train.epochs=2",
        "checkpoint.every_steps=1",
        f"data.cache={to.parent / 'cache'}",
        *options.pop("settings", ()),
    ]
    return mh.train(
        regression(data),
        to=to,
        workers=workers,
        settings=settings,
        quiet=True,
        launcher=launcher,
        **options,
    )


def windowed(data: Any) -> Any:
    """So that a few shards are open at a time."""
    return prepared(data, window=20)


# ---- opening


def test_opening_fetches_the_manifest_once_and_nothing_else(
    web: Web, folder: Path, settings: DataConfig
) -> None:
    train, held = open_data(web.url("clicks"), None, settings)
    assert held is not None and (len(train), len(held)) == (SHARDS * ROWS, 2 * ROWS)
    assert web.asked == {"manifest.json": 1}
    local, local_held = open_data(str(folder), None)
    assert local_held is not None
    assert sampled_digest(train) == sampled_digest(local)
    assert sampled_digest(held) == sampled_digest(local_held)
    assert sampled_digest(train.part(np.arange(9))) == sampled_digest(local.part(np.arange(9)))


def test_batches_are_those_of_the_local_folder(
    web: Web, folder: Path, settings: DataConfig
) -> None:
    far, _ = open_data(windowed(web.url("clicks")), None, settings)
    near, _ = open_data(windowed(folder), None)
    assert isinstance(far, ShardRecords) and isinstance(near, ShardRecords)
    asked = np.asarray([0, ROWS * SHARDS - 1, 40])
    assert torch.equal(far.batch(asked)["x"], near.batch(asked)["x"])
    far.close()
    near.close()
    assert max(web.asked.values()) == 1


def test_a_url_is_never_shown_with_its_secrets(web: Web, settings: DataConfig) -> None:
    data = prepared(web.url("clicks"))
    assert isinstance(data.folder, RemoteFolder)
    assert without_secrets(repr(data)).count(web.shown("clicks")) == 1
    with pytest.raises(DataError, match="no split 'tset'") as caught:
        open_data(prepared(web.url("clicks"), "tset"), None, settings)
    without_secrets(str(caught.value))
    with pytest.raises(DataError, match=r"nothing\?\.\.\. is not a prepared .* no file") as caught:
        open_data(web.url("nothing"), None, settings)
    without_secrets(str(caught.value))
    web.end()
    with pytest.raises(DataError, match=r"not a prepared data set.*(?i:connect)") as caught:
        open_data(web.url("clicks"), None, settings)
    without_secrets(str(caught.value))


def test_paths_and_file_urls_are_local(folder: Path, tmp_path: Path) -> None:
    assert folder_of(str(folder)) == folder_of(f"file://{folder}") == folder_of(folder) == folder
    train, _ = open_data(f"file://{folder}", None, DataConfig(cache=str(tmp_path / "not made")))
    assert len(train) == SHARDS * ROWS and not (tmp_path / "not made").exists()


def test_a_url_that_was_made_a_path_is_explained() -> None:
    with pytest.raises(DataError, match="s3://host/x was given as a Path") as caught:
        open_data(Path("s3://user:hunter22@host/x"), None)
    without_secrets(str(caught.value))


def test_folds_and_other_held_out_data_behind_urls(
    web: Web, folder: Path, settings: DataConfig
) -> None:
    for k in range(2):
        write_folder(folder.parent / "folds" / f"fold-{k}", {"train": [numbers(k, 9 + k)]})
    whole = read_manifest(folder)
    root = Manifest(1, "arrow", 0, whole.schema, {}, folds=2)
    write_manifest(folder.parent / "folds", root)
    with pytest.raises(TaskError) as caught:
        open_data(web.url("folds"), None, settings)
    assert "has 2 folds; choose one" in without_secrets(str(caught.value))
    train, held = open_data(
        web.url("folds"), web.url("clicks"), dataclasses.replace(settings, fold=1)
    )
    assert held is not None and (len(train), len(held)) == (10, 2 * ROWS)
    assert train.batch(np.asarray([9]))["_id"].tolist() == [10]
    assert isinstance(train, ShardRecords)
    train.close()
    for data in (web.url("folds"), str(folder.parent / "folds")):
        task = folder.parent / "task.py"
        task.write_text(
            "import manyhands as mh, torch\n"
            f"task = mh.Task(data={data!r}, loss=lambda model, batch: 0,\n"
            "    model=lambda: torch.nn.Linear(1, 1),\n"
            "    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1))\n"
        )
        assert cross_validate._folds_of(load_task(task).task.data) == 2


# ---- settings


def test_the_cache_is_private_and_below_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    cache = open_cache(DataConfig())
    assert cache.folder == tmp_path / "xdg" / "manyhands" and cache.limit is None
    assert stat.S_IMODE(cache.folder.stat().st_mode) == 0o700
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert open_cache(DataConfig()).folder == tmp_path / "home" / ".cache" / "manyhands"
    given = open_cache(DataConfig(cache="~/mine", cache_limit="20GB"))
    assert (given.folder, given.limit) == (tmp_path / "home" / "mine", 20 * 10**9)
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o755)
    assert stat.S_IMODE(open_cache(DataConfig(cache=str(shared))).folder.stat().st_mode) == 0o755


def test_what_cannot_be_a_cache_is_named(web: Web, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot be made: .*data\.cache = PATH"):
        open_data(web.url("clicks"), None, DataConfig(cache=str(tmp_path / "file" / "cache")))
    for data in (folder, web.url("clicks")):
        with pytest.raises(ConfigError, match=r"data\.cache_limit: '20 apples' is not a size"):
            open_data(data, None, DataConfig(cache_limit="20 apples"))


def test_settings_choose_the_transfer(web: Web, settings: DataConfig) -> None:
    kinds = {"auto": Direct, "direct": Direct, "peer": Peer, "replicate": Replicate}
    for name, kind in kinds.items():
        chosen = msgspec.convert({"cache": settings.cache, "transfer": name}, DataConfig)
        train, held = open_data(web.url("clicks"), None, chosen)
        assert isinstance(train, ShardRecords) and isinstance(held, ShardRecords)
        assert isinstance(train.data.transfer, kind) and isinstance(held.data.transfer, kind)
        assert train.data.transfer.cache is held.data.transfer.cache
    mine = Direct(web.url("clicks"), Cache(settings.cache or ""))
    train, _ = open_data(prepared(web.url("clicks"), transfer=mine), None, settings)
    assert isinstance(train, ShardRecords) and train.data.transfer is mine


def test_a_cache_that_is_too_small_is_refused_with_the_numbers(
    web: Web, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_before_start, "megabytes", lambda nbytes: f"{nbytes}B")
    manifest = read_manifest(folder)
    shard = manifest.splits["train"].shards[0].nbytes
    assert {s.nbytes for split in manifest.splits.values() for s in split.shards} == {shard}
    whole = (SHARDS + 2) * shard
    each = 6 * shard  # two windows of two shards, and all of the test

    def ready(limit: int, workers: int, transfer: Any = "auto") -> None:
        chosen = DataConfig(
            cache=str(tmp_path / "cache"), cache_limit=f"{limit}", transfer=transfer
        )
        train, held = open_data(windowed(web.url("clicks")), None, chosen)
        make_ready(train, held, workers=workers, quiet=True)

    ready(each, 1)
    says = rf"may hold {each - 1}B, but 1 workers have up to {each}B each .* {each}B are needed"
    with pytest.raises(ConfigError, match=says):
        ready(each - 1, 1)
    ready(whole, 2)  # never more than there is
    with pytest.raises(ConfigError, match=rf"{whole}B are needed.*window=RECORDS"):
        ready(whole - 1, 2)
    assert web.asked.keys() == {"manifest.json"}
    with pytest.raises(ConfigError, match=r'keeps all shards .* data\.transfer = "direct"'):
        ready(whole - 1, 1, "replicate")
    ready(whole, 9, "replicate")
    assert len(web.asked) == 1 + SHARDS + 2


# ---- before the start


def test_only_what_takes_long_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fetch_before_start, "SHOW_AFTER_S", 30.0)
    with shown_when_slow("fetching x", quiet=False) as progress:
        assert progress is not None
        progress(1, 2)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(fetch_before_start, "SHOW_AFTER_S", 0.01)
    with shown_when_slow("fetching x", quiet=False):
        time.sleep(0.2)
    assert capsys.readouterr().err == "fetching x\n"
    with shown_when_slow("fetching x", quiet=True) as progress:
        assert progress is None
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("FORCE_COLOR", "1")  # to Rich, that is a terminal
    with shown_when_slow("fetching x", quiet=False) as progress:
        time.sleep(0.2)
        assert progress is not None
        progress(3_000_000, 4_000_000)
    assert "fetching x" in (said := capsys.readouterr().err) and "3.0/4.0 MB" in said


# ---- training


@pytest.mark.parametrize("workers", [1, 2])
def test_training_from_a_url_gives_the_same_bits(
    web: Web, folder: Path, tmp_path: Path, launcher: Launcher, workers: int
) -> None:
    near = train(windowed(folder), tmp_path / "near", launcher)
    far = train(windowed(web.url("clicks")), tmp_path / "far", launcher, workers)
    assert far.fingerprint == near.fingerprint and far.scores == near.scores
    notes = [json.loads((tmp_path / n / "task" / "task.json").read_text()) for n in ("near", "far")]
    assert notes[0]["data"] == notes[1]["data"]
    shards = {name: n for name, n in web.asked.items() if name != "manifest.json"}
    assert set(shards.values()) == {1} and len(shards) == SHARDS + 2  # for all workers together
    for path in (tmp_path / "far").rglob("*"):
        if path.is_file():
            without_secrets(path.read_bytes().decode(errors="replace"))


def test_a_run_goes_on_from_another_place_with_the_same_data(
    web: Web, folder: Path, tmp_path: Path, launcher: Launcher
) -> None:
    whole = train(windowed(folder), tmp_path / "whole", launcher)
    train(windowed(folder), tmp_path / "half", launcher, settings=["train.steps=5"])
    again = mh.resume(
        tmp_path / "half",
        regression(windowed(web.url("clicks"))),
        settings=[f"train.steps={whole.step}"],
        workers=2,
        quiet=True,
        launcher=launcher,
    )
    assert again.fingerprint == whole.fingerprint
    said = (tmp_path / "half" / "events.jsonl").read_text()
    assert "is not what the run began with" not in said


def test_replicated_data_needs_its_origin_no_more(
    web: Web, folder: Path, tmp_path: Path, launcher: Launcher
) -> None:
    near = train(windowed(folder), tmp_path / "near", launcher)

    def end(event: Any) -> None:
        web.end()

    far = train(
        windowed(web.url("clicks")),
        tmp_path / "far",
        launcher,
        2,
        settings=["data.transfer=replicate"],
        on_step=end,
    )
    assert far.fingerprint == near.fingerprint
    assert {n for name, n in web.asked.items() if name != "manifest.json"} == {1}


def test_a_server_that_dies_is_named_and_the_run_can_go_on(
    web: Web, folder: Path, tmp_path: Path, launcher: Launcher
) -> None:
    data, web.sends = windowed(web.url("clicks")), 3 + 5  # manifests for driver and workers, shards
    with pytest.raises(RunFailed) as caught:
        train(data, tmp_path / "far", launcher, 2)
    said = without_secrets(str(caught.value))
    assert f"{web.shown('clicks')}?...: " in said and "manyhands resume" in said
    assert re.search(r"train-0000\d.arrow is nowhere to be had", said)
    assert "isconnected" in said
    web.end()
    with pytest.raises(DataError, match=r"clicks\?\.\.\. is not a prepared .*onnect") as refused:
        mh.resume(tmp_path / "far", regression(data), quiet=True, launcher=launcher)
    without_secrets(str(refused.value))
    web.sends = None
    web.again()
    again = mh.resume(tmp_path / "far", regression(data), quiet=True, launcher=launcher)
    near = train(windowed(folder), tmp_path / "near", launcher)
    assert again.fingerprint == near.fingerprint


def test_a_byte_that_is_served_wrongly_is_found_and_named(
    web: Web, tmp_path: Path, launcher: Launcher
) -> None:
    web.flips["train-00003.arrow"] = 700
    with pytest.raises(RunFailed) as caught:
        train(web.url("clicks"), tmp_path / "far", launcher, 2)
    said = without_secrets(str(caught.value))
    assert "train-00003.arrow is nowhere to be had whole" in said
    assert f"{web.shown('clicks')}?...: its bytes 0 to" in said and "--verify" in said


# ---- looking


def data_command(*arguments: str) -> tuple[int, str, BaseException | None]:
    result = CliRunner().invoke(app, ["data", *arguments])
    return result.exit_code, without_secrets(result.output), result.exception


def test_a_remote_folder_can_be_looked_at(
    web: Web, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    far, near = overview(folder_of(web.url("clicks"))), overview(folder)
    assert far.pop("folder") == f"{web.shown('clicks')}?..." and near.pop("folder") == str(folder)
    assert far == near and web.asked.keys() == {"manifest.json"}
    code, said, _ = data_command(web.url("clicks"))
    assert code == 0 and web.shown("clicks") in said and "record 1" in said
    assert web.asked.keys() == {"manifest.json", "train-00000.arrow"}
    code, said, _ = data_command(web.url("clicks"), "--json")
    assert code == 0 and json.loads(said)["rows"] == (SHARDS + 2) * ROWS


def test_every_byte_behind_a_url_is_checked(web: Web, folder: Path) -> None:
    code, said, _ = data_command(web.url("clicks"), "--verify")
    assert code == 0 and "every byte is as it was written" in said
    web.flips["train-00003.arrow"] = 700
    (folder / "train-00004.arrow").unlink()
    with open(folder / "train-00005.arrow", "ab") as file:
        file.write(b"more")
    with open(folder / "train-00006.arrow", "r+b") as file:
        file.truncate(100)
    found = verified(folder_of(web.url("clicks")))
    says = ["00003.arrow: bytes 0 to", "cannot be read", "too many at the end", "bytes 100 to"]
    assert len(found) == 4 and all(s in f for s, f in zip(says, found, strict=True)), found
    without_secrets(" ".join(found))
    code, _, error = data_command(web.url("clicks"), "--verify")
    assert code != 0 and isinstance(error, DataDamaged)
