"""Warnings of the user's own code: kept, counted, and out of what we print."""

from pathlib import Path

import pytest

import manyhands as mh
from manyhands.launch.engines.launcher import Launcher
from manyhands.values import events

TASK = """
import warnings
import torch, manyhands as mh

warnings.simplefilter("always")
warnings.warn("old data")

def task(lr=0.1):
    warnings.warn("another", DeprecationWarning)
    return mh.Task(
        model=lambda: torch.nn.Linear(1, 1),
        loss=lambda m, b: m(b["x"]).mean(),
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=lr),
        data={"x": torch.zeros(8, 1)},
    )
"""


def test_they_are_kept_and_counted(
    launcher: Launcher, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file, run = tmp_path / "task.py", tmp_path / "run"
    file.write_text(TASK)
    mh.train(file, to=run, workers=1, quiet=True, launcher=launcher)
    kept = (run / "logs" / "task-file.log").read_text().splitlines()
    assert [line.partition(": ")[2] for line in kept] == [
        "UserWarning: old data",
        "DeprecationWarning: another",
    ]
    told = [
        e.text for e in events.read_events(run / "events.jsonl") if isinstance(e, events.Warned)
    ]
    (said,) = [text for text in told if "warned" in text]
    assert said.startswith("the task's own code warned 2 times; first: ") and "UserWarning" in said
    out = capfd.readouterr()
    assert "DeprecationWarning" not in out.err and "warnings.warn(" not in out.err + out.out


def test_a_run_without_any_has_no_such_log(launcher: Launcher, tmp_path: Path) -> None:
    file, run = tmp_path / "task.py", tmp_path / "run"
    file.write_text("\n".join(line for line in TASK.splitlines() if "warn(" not in line))
    mh.train(file, to=run, workers=1, quiet=True, launcher=launcher)
    assert not (run / "logs" / "task-file.log").exists()
