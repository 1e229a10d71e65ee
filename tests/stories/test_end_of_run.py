"""A command after the run, and a function after every evaluation."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import manyhands as mh
from manyhands.launch.engines.launcher import Launcher
from manyhands.values import events

NOTES = 'echo "$MANYHANDS_STATUS $MANYHANDS_EXIT_CODE $MANYHANDS_STEP $MANYHANDS_RUN" >> {file}'
SETTINGS = ["train.batch=16", "train.steps=2"]


def task(wrong: bool = False) -> mh.Task:
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))

    def loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if wrong:
            raise ValueError("wrong")
        return (model(batch["x"])[:, 0] - batch["y"]).square().mean()

    return mh.Task(
        model=lambda: torch.nn.Linear(4, 1),
        loss=loss,
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
        data={"x": x, "y": x.sum(1)},
        held_out=0.25,
    )


def test_it_is_told_how_the_run_ended(launcher: Launcher, tmp_path: Path) -> None:
    file = tmp_path / "notes"
    more = {"on_end": NOTES.format(file=file), "quiet": True, "launcher": launcher, "workers": 1}
    run = tmp_path / "run"
    mh.train(task(), to=run, settings=SETTINGS, **more)
    with pytest.raises(mh.RunFailed):
        mh.train(task(wrong=True), to=tmp_path / "broken", settings=SETTINGS, **more)
    with pytest.raises(mh.RequestError):
        mh.train(task(), to=tmp_path / "other", settings=["train.bacth=3"], **more)
    with pytest.raises(mh.RequestError, match="already exists"):
        mh.train(task(), to=run, settings=SETTINGS, **more)
    mh.resume(run, task(), settings=["train.steps=3"], **more)
    assert file.read_text().splitlines() == [
        f"finished 0 2 {run}",
        f"failed 1 0 {tmp_path / 'broken'}",
        "refused 2  ",
        f"refused 2 2 {run}",
        f"finished 0 3 {run}",
    ]


def test_scores_and_fingerprint_are_in_its_environment(launcher: Launcher, tmp_path: Path) -> None:
    file = tmp_path / "notes"
    report = mh.train(
        task(),
        to=tmp_path / "run",
        settings=SETTINGS,
        workers=1,
        quiet=True,
        launcher=launcher,
        on_end=f'echo "$MANYHANDS_SCORES" > {file}; echo "$MANYHANDS_FINGERPRINT" >> {file}',
    )
    scores, fingerprint = file.read_text().splitlines()
    assert json.loads(scores) == report.scores and fingerprint == report.fingerprint


def test_its_failure_is_said_and_changes_nothing(
    launcher: Launcher, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    report = mh.train(
        task(),
        to=tmp_path / "run",
        settings=SETTINGS,
        workers=1,
        quiet=True,
        launcher=launcher,
        on_end="echo to nobody; exit 7",
    )
    said = capfd.readouterr()
    assert report.step == 2 and said.out == ""
    assert "to nobody" in said.err and "--on-end ended with exit code 7" in said.err


def test_a_command_runs_it_when_all_is_printed(tmp_path: Path) -> None:
    """The summary first; and what it prints is not in our answer."""
    (tmp_path / "task.py").write_text(
        "import torch, manyhands as mh\n"
        "task = mh.Task(model=lambda: torch.nn.Linear(1, 1), loss=lambda m, b: m(b['x']).mean(),\n"
        "    optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1),\n"
        "    data={'x': torch.zeros(8, 1)})\n"
    )
    arguments = ["train", "task.py", "--to", "run", "--workers", "1", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "manyhands", *arguments, "--on-end", "cat run/report.json; exit 3"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["step"] == 1
    assert '"fingerprint"' in done.stderr and "ended with exit code 3" in done.stderr


def test_every_evaluation_is_called_back(launcher: Launcher, tmp_path: Path) -> None:
    seen: list[events.Evaluated] = []
    report = mh.train(
        task(),
        to=tmp_path / "run",
        workers=2,
        settings=["train.batch=16", "train.steps=4", "evaluate.every_steps=2"],
        quiet=True,
        launcher=launcher,
        on_evaluate=seen.append,
    )
    assert [event.step for event in seen] == [2, 4]
    assert seen[-1].scores == report.scores


def test_what_it_raises_is_its_own_fault(launcher: Launcher, tmp_path: Path) -> None:
    def stop(event: events.Evaluated) -> None:
        raise ValueError(f"too late at {event.step}")

    with pytest.raises(mh.RunFailed, match="on_evaluate raised ValueError: too late at 2") as told:
        mh.train(
            task(),
            to=tmp_path / "run",
            workers=1,
            settings=SETTINGS,
            quiet=True,
            launcher=launcher,
            on_evaluate=stop,
        )
    assert "That function is yours" in str(told.value)
