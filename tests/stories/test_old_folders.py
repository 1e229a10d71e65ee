"""Runs and prepared folders that an earlier manyhands made: they resume, replay and read.

How they were made is in tests/old_folders/README.md. Every test works on a copy.
"""

import csv
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import manyhands as mh
from manyhands.cli import exit_codes
from manyhands.data.open_data import open_data
from manyhands.data.reading.records import Records
from manyhands.launch.engines.launcher import Launcher
from manyhands.values.config import DataConfig

OLD = Path(__file__).parents[1] / "old_folders"
FINGERPRINTS = {
    ("exact", 6): "5f7e55b649bb6d9bf6dc7f5c6ee0fccc33555b3e2eaab4c93b43c270853a41e0",
    ("exact", 12): "d39dbb28c3a64eda3b9696c52b26d0b10f49b4397d4323293f2e93793ca2c6a3",
    ("rich", 440): "4564ff2a672d3f64d6e3eb397e8386f56277f994c08e3baf007916d63449a218",
}
"""As the code that made the folders printed them."""
LAST = FINGERPRINTS["exact", 12]

Command = Callable[..., str]


@pytest.fixture
def exact(tmp_path: Path) -> Path:
    return copy("exact", tmp_path)


@pytest.fixture
def rich(tmp_path: Path) -> Path:
    """Its task reads the folder that stands beside the task's file, which is now the copy of it."""
    folder = copy("rich", tmp_path)
    copy("people", folder / "task")
    return folder


@pytest.fixture
def people(tmp_path: Path) -> Path:
    return copy("people", tmp_path)


def copy(name: str, to: Path) -> Path:
    return Path(shutil.copytree(OLD / name, to / name))


@pytest.fixture
def manyhands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """A command that works, in this process; what it printed."""

    def call(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["manyhands", *map(str, arguments)])
        try:
            exit_codes.main()
        except SystemExit as error:
            assert error.code in (None, 0), capsys.readouterr().err
        return capsys.readouterr().out

    return call


def proven(manyhands: Command, run: Path) -> dict[str, Any]:
    return json.loads(manyhands("ledger", run, "--check", "--json"))


# ---- runs


@pytest.mark.parametrize(("name", "step"), FINGERPRINTS, ids=str)
def test_the_weights_have_the_fingerprints_they_had(name: str, step: int, tmp_path: Path) -> None:
    assert mh.fingerprint(copy(name, tmp_path), step=step) == FINGERPRINTS[name, step]


@pytest.mark.parametrize("workers", [1, 3])
def test_an_old_run_goes_on_and_ends_with_the_same_bits(
    workers: int, exact: Path, launcher: Launcher, manyhands: Command
) -> None:
    shutil.rmtree(exact / "checkpoints" / "step-00000012")
    report = mh.resume(exact, workers=workers, quiet=True, launcher=launcher)
    assert (report.step, report.fingerprint) == (12, LAST)
    proof = proven(manyhands, exact)
    assert (proof["steps"], proof["rewinds"]) == (12, [6])


@pytest.mark.parametrize(("step", "to", "saved"), [(9, None, []), (9, 12, [12]), (0, 12, [6, 12])])
def test_steps_of_an_old_run_have_the_same_bits_again(
    step: int, to: int | None, saved: list[int], exact: Path, launcher: Launcher
) -> None:
    found = mh.replay(exact, step=step, to=to, workers=2, launcher=launcher)
    assert found.same, found.differences
    assert found.compared_weights == saved
    last = to or step + 1
    assert found.compared_losses == list(range(7 if step >= 6 else 1, last + 1))
    assert last < 12 or found.fingerprint == LAST


def test_a_finished_run_is_read_as_before(exact: Path, manyhands: Command) -> None:
    report = json.loads((exact / "report.json").read_text())
    status = json.loads(manyhands("status", exact, "--json"))
    assert (status["state"], status["step"], status["saved"]) == ("finished", 12, [6, 12])
    assert (status["fingerprint"], status["scores"]) == (LAST, report["scores"])
    assert [worker["micro_batches"] for worker in status["workers"]] == [2, 2]
    assert "finished" in manyhands("status", exact)
    (listed,) = json.loads(manyhands("runs", exact.parent, "--json"))
    assert (listed["run"], listed["state"]) == (str(exact), "finished")
    proof = proven(manyhands, exact)
    assert proof["ok"] and proof["steps"] == 12
    assert {share["records"] for share in proof["by_worker"].values()} == {48}
    assert json.loads(manyhands("evaluate", exact, "--json")) == report["scores"]


def test_a_stopped_run_is_read_as_before(rich: Path, manyhands: Command) -> None:
    status = json.loads(manyhands("status", rich, "--json"))
    assert (status["state"], status["step"], status["saved"]) == ("stopped", 440, [440])
    proof = proven(manyhands, rich)
    assert proof["ok"] and proof["steps"] == 440
    assert proof["changes"] == [{"entry": "Changed", "step": 299, "settings": {"lr": 0.005}}]
    scores = json.loads(manyhands("evaluate", rich, "--json"))
    assert scores == {"loss": pytest.approx(0.24847915, rel=1e-5)}


def test_a_changed_rate_outlives_stopping_and_other_workers(
    rich: Path, launcher: Launcher, manyhands: Command
) -> None:
    """The bits of the steps after it are this processor's own: they are replayed from the saved
    step, which is kept."""
    before = len((rich / "events.jsonl").read_text().splitlines())
    settings = ["train.steps=450", "checkpoint.keep_last=2"]
    report = mh.resume(rich, workers=3, settings=settings, quiet=True, launcher=launcher)
    assert (report.step, report.workers) == (450, 3)
    lines = (rich / "events.jsonl").read_text().splitlines()[before:]
    rates = [event["lr"] for event in map(json.loads, lines) if event["event"] == "Stepped"]
    assert set(rates) == {0.005}
    proof = proven(manyhands, rich)
    assert proof["ok"] and proof["steps"] == 450 and proof["rewinds"] == [440]
    assert [change["settings"] for change in proof["changes"]] == [{"lr": 0.005}]
    again = mh.replay(rich, step=445, to=450, workers=2, launcher=launcher)
    assert again.same and again.fingerprint == report.fingerprint, again.differences


# ---- prepared data


def records_of(people: Path, split: str) -> Records:
    return open_data(mh.prepared(people, split), None, DataConfig())[0]


def test_old_shards_hold_the_records_of_the_file(people: Path) -> None:
    with (OLD / "people.csv").open() as file:
        rows = list(csv.DictReader(file))
    encoders = json.loads((people / "manifest.json").read_text())["encoders"]
    seen: list[int] = []
    for split in ("train", "test"):
        records = records_of(people, split)
        batch = records.batch(np.arange(len(records)))
        raw = [rows[i] for i in batch["_id"].tolist()]
        seen += batch["_id"].tolist()
        for name in ("age", "height"):
            how = encoders[name]
            values = [float(row[name] or how["fill"]) for row in raw]
            wanted = (torch.tensor(values, dtype=torch.float64) - how["center"]) / how["scale"]
            torch.testing.assert_close(batch[name], wanted.float())
        for name, first in (("colour", 2), ("label", 0)):  # 0 and 1: never seen and missing
            values = encoders[name]["values"]
            assert batch[name].tolist() == [first + values.index(row[name]) for row in raw]
    assert sorted(seen) == list(range(len(rows)))


def test_an_old_prepared_folder_is_whole_and_trains(
    people: Path, launcher: Launcher, manyhands: Command
) -> None:
    assert "every byte is as it was written" in manyhands("data", people, "--verify")
    assert json.loads(manyhands("data", people, "--verify", "--json"))["damage"] == []
    assert "colour" in manyhands("data", people)
    shutil.copy(OLD / "rich_task.py", people.parent)
    reports = [
        mh.train(
            people.parent / "rich_task.py",
            to=people.parent / f"run-{workers}",
            workers=workers,
            settings=["train.batch=16", "train.steps=15"],
            quiet=True,
            launcher=launcher,
        )
        for workers in (1, 2)
    ]
    assert reports[0].fingerprint == reports[1].fingerprint
