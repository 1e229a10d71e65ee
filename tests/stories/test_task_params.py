"""A task with parameters, through everything that finds a run's task again."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import manyhands as mh
from manyhands.launch.engines.launcher import Launcher
from manyhands.stories.replay import replay
from manyhands.stories.status import list_runs, status
from manyhands.values.config import read_toml
from manyhands.values.errors import ConfigError, TaskError
from manyhands.values.planned_faults import FaultPlan

TASK = """
import torch
from torch import nn

import manyhands as mh

x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
{before}

def task(lr=1e-3, width=4, sizes=(1, 2)):
    assert isinstance(sizes, tuple)
    return mh.Task(
        model=lambda: nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 1)),
        loss=lambda m, b: ((m(b["x"])[:, 0] - b["y"]) ** 2).mean(){more},
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=lr),
        data={{"x": x, "y": x.sum(1)}},
        held_out=0.25,
    )
"""
SETTINGS = ["train.batch=16", "train.micro_batch=4", "train.steps=4", "checkpoint.every_steps=2"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "task.py"
    path.write_text(TASK.format(before="", more=""))
    return path


def same_without(lr: float, width: int) -> mh.Task:
    """What the file makes of these parameters, made without it."""
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    return mh.Task(
        model=lambda: nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 1)),
        loss=lambda m, b: ((m(b["x"])[:, 0] - b["y"]) ** 2).mean(),
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=lr),
        data={"x": x, "y": x.sum(1)},
        held_out=0.25,
    )


def test_a_run_keeps_its_parameters(file: Path, launcher: Launcher, tmp_path: Path) -> None:
    calm = mh.train(
        same_without(0.1, 8),
        to=tmp_path / "plain",
        workers=1,
        settings=SETTINGS,
        quiet=True,
        launcher=launcher,
    )
    run = tmp_path / "runs" / "run"
    params = {"lr": 0.1, "width": 8}
    begun = mh.train(
        file,
        to=run,
        params=params,
        workers=3,
        settings=[*SETTINGS, "train.steps=2"],
        faults=FaultPlan().kill(rank=1, at_step=1),
        quiet=True,
        launcher=launcher,
    )
    assert begun.step == 2 and begun.recoveries == 1
    with pytest.raises(ConfigError, match=r"lr is part of the result.*taken with lr=0\.1") as told:
        mh.resume(run, params=["lr=0.2"], settings=["train.steps=4"], quiet=True, launcher=launcher)
    assert "--param lr=0.2" in str(told.value) and "train.start_from=" in str(told.value)
    assert "how many rows a table may have" in str(told.value)
    more = {"settings": ["train.steps=4"], "quiet": True, "launcher": launcher}
    again = mh.resume(run, params={"lr": 0.1}, workers=2, **more)
    assert again.fingerprint == calm.fingerprint
    assert replay(run, step=0, to=4, workers=2, launcher=launcher).same
    assert mh.evaluate(run) == calm.scores
    assert status(run)["params"] == {"lr": 0.1, "width": 8, "sizes": [1, 2]}
    assert [row["params"]["width"] for row in list_runs(run.parent)] == [8]
    repeated = mh.train(
        run / "config.toml", to=tmp_path / "repeated", quiet=True, launcher=launcher
    )
    assert repeated.fingerprint == calm.fingerprint


def test_toml_has_params_and_the_command_line_wins(
    file: Path, launcher: Launcher, tmp_path: Path
) -> None:
    toml = tmp_path / "run.toml"
    toml.write_text('task = "task.py"\n[params]\nlr = 0.5\nwidth = 8\n[train]\nsteps = 1\n')
    config, _ = read_toml(toml)
    assert config.train.steps == 1
    run = tmp_path / "run"
    mh.train(toml, to=run, params=["lr=0.1"], workers=1, quiet=True, launcher=launcher)
    assert status(run)["params"] == {"lr": 0.1, "width": 8, "sizes": [1, 2]}


def test_workers_that_run_the_file_themselves_make_the_same_task(
    launcher: Launcher, tmp_path: Path
) -> None:
    """A lock cannot be sent to them."""
    path = tmp_path / "task.py"
    locked = "import sys, threading\nassert len(sys.argv) == 1\nlock = threading.Lock()\n"
    path.write_text(TASK.format(before=locked, more=" + 0 * lock.locked()"))
    report = mh.train(
        path,
        to=tmp_path / "run",
        params={"lr": 0.1, "width": 8},
        workers=2,
        settings=SETTINGS,
        quiet=True,
        launcher=launcher,
    )
    plain = mh.train(
        same_without(0.1, 8),
        to=tmp_path / "plain",
        workers=1,
        settings=SETTINGS,
        quiet=True,
        launcher=launcher,
    )
    assert report.fingerprint == plain.fingerprint


def test_a_file_that_takes_other_parameters_now_is_named(
    file: Path, launcher: Launcher, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    mh.train(file, to=run, workers=1, settings=SETTINGS, quiet=True, launcher=launcher)
    file.write_text(file.read_text().replace("width", "breadth"))
    with pytest.raises(TaskError, match="takes other parameters than those") as told:
        mh.evaluate(run)
    assert "--param width" in str(told.value) and str(run / "task" / "task.py") in str(told.value)


def test_a_task_from_python_has_none(launcher: Launcher, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="without parameters"):
        mh.train(same_without(0.1, 8), to=tmp_path / "run", params={"lr": 1}, launcher=launcher)
    assert not (tmp_path / "run").exists()
    for given, said in (
        (same_without, r"function: give what it returns, same_without\(\.\.\.\)"),
        ({"model": 3}, r"dict: make one of it with mh\.Task"),
        (3, "int: give a mh.Task, or the file"),
    ):
        with pytest.raises(TaskError, match=said):
            mh.train(given, to=tmp_path / "run", launcher=launcher)  # type: ignore[arg-type]


def test_the_record_is_plain_json(file: Path, launcher: Launcher, tmp_path: Path) -> None:
    run = tmp_path / "run"
    mh.train(file, to=run, workers=1, settings=SETTINGS, quiet=True, launcher=launcher)
    assert json.loads(json.dumps(status(run)["params"]))["sizes"] == [1, 2]
