"""Whatever is wrong with a run's folder: nobody is given another step than the one asked for."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import manyhands as mh
from manyhands.launch.engines.launcher import Launcher
from manyhands.stories.replay import replay
from manyhands.stories.status import list_runs, status
from manyhands.values.errors import CheckpointDamaged, CheckpointMismatch

FILES = ["model.safetensors", "state.safetensors", "optimizer-00.safetensors", "manifest.json"]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x40
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


DAMAGES: dict[str, Callable[[Path], None]] = {
    "flipped": flip,
    "truncated": truncate,
    "empty": empty,
    "missing": Path.unlink,
}


def task() -> mh.Task:
    return mh.Task(
        model=lambda: nn.Linear(3, 2),
        loss=lambda m, b: nn.functional.cross_entropy(m(b["x"]), b["y"]),
        optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=0.1),
        data={
            "x": torch.randn(40, 3, generator=torch.Generator().manual_seed(0)),
            "y": torch.arange(40) % 2,
        },
        held_out=0.2,
    )


@pytest.fixture(scope="module")
def whole(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 2, 4 and 6 are saved."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    settings = ["train.batch=8", "train.steps=6", "checkpoint.every_steps=2"]
    mh.train(task(), to=folder, workers=1, settings=settings, quiet=True, launcher=launcher)
    return folder


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole, tmp_path / "run")
    return tmp_path / "run"


def newest(run: Path) -> Path:
    return run / "checkpoints" / "step-00000006"


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_newest_step_is_no_other_step(
    file: str, damage: str, run: Path, whole: Path
) -> None:
    DAMAGES[damage](newest(run) / file)
    # A flip in the manifest may be one in what it says of a file.
    named = "step-00000006" if file == "manifest.json" else file.replace(".", r"\.")
    for ask in (mh.fingerprint, lambda r: mh.evaluate(r, task())):
        with pytest.raises(CheckpointDamaged, match=named) as refused:
            ask(run)
        assert "The newest good one is step 4" in str(refused.value)
        assert "--step" in str(refused.value)
    with pytest.raises(CheckpointDamaged):
        mh.fingerprint(run, step=6)
    assert mh.fingerprint(run, step=4) == mh.fingerprint(whole, step=4)
    assert mh.evaluate(run, task(), step=4) == mh.evaluate(whole, task(), step=4)


def test_a_newest_step_that_is_gone_is_no_other_step(run: Path, whole: Path) -> None:
    shutil.rmtree(newest(run))
    with pytest.raises(CheckpointDamaged, match=r"step 6 was saved, and .* is gone"):
        mh.fingerprint(run)
    assert mh.fingerprint(run, step=4) == mh.fingerprint(whole, step=4)
    assert status(run)["damaged"][0].startswith("step 6 was saved")


def test_the_command_exits_with_1_and_prints_no_fingerprint(run: Path) -> None:
    truncate(newest(run) / "model.safetensors")
    command = [sys.executable, "-m", "manyhands", "fingerprint", str(run)]
    asked = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (asked.returncode, asked.stdout) == (1, "")
    assert "model.safetensors is damaged" in asked.stderr and "step 4" in asked.stderr


@pytest.mark.parametrize("damage", ["truncated", "empty", "missing"])
@pytest.mark.parametrize("file", FILES)
def test_status_tells_what_can_be_seen_at_once(file: str, damage: str, run: Path) -> None:
    assert status(run)["damaged"] == []
    DAMAGES[damage](newest(run) / file)
    (told,) = status(run)["damaged"]
    assert file in told


def test_nobody_starts_from_another_step_unasked(
    run: Path, launcher: Launcher, tmp_path: Path
) -> None:
    flip(newest(run) / "model.safetensors")
    with pytest.raises(CheckpointMismatch, match=r"newest good one is step 4.*give its model"):
        mh.train(
            task(),
            to=tmp_path / "next",
            settings=["train.steps=1", f"train.start_from={run}"],
            quiet=True,
            launcher=launcher,
        )
    assert not (tmp_path / "next").exists()


def test_a_replay_says_where_it_began_and_what_it_could_not_compare(
    run: Path, launcher: Launcher
) -> None:
    flip(run / "checkpoints" / "step-00000004" / "state.safetensors")
    found = replay(run, task(), step=4, to=6, launcher=launcher)
    assert (found.first, found.same, found.compared_weights) == (2, True, [6])
    assert "step-00000004" in found.passed_over[0] and not found.damaged
    shutil.rmtree(newest(run))
    found = replay(run, task(), step=5, launcher=launcher)
    assert "step 6 was saved" in found.damaged[0]


def test_a_resume_says_which_step_it_goes_on_from(
    run: Path, launcher: Launcher, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(newest(run))
    mh.resume(run, task(), settings=["train.steps=7"], quiet=True, launcher=launcher)
    said = " ".join(capsys.readouterr().err.split())
    assert "step 6 was saved" in said and "using step 4 instead" in said
    assert mh.fingerprint(run), "its newest step is another one now"


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(
    "file", ["status.json", "events.jsonl", "report.json", "plan.json", "ledger.jsonl"]
)
def test_status_and_runs_answer_whatever_is_damaged(file: str, damage: str, run: Path) -> None:
    DAMAGES[damage](run / file)
    assert status(run)["saved"] == [2, 4, 6]
    (row,) = list_runs(run.parent)
    assert row["run"] == str(run)
    if file == "status.json" and damage != "flipped":
        assert row["state"] == ("starting" if damage == "missing" else "unknown")
