"""What people are told to type is typed, into a real shell."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import manyhands as mh
from manyhands.launch.engines.launcher import Launcher
from manyhands.values.errors import Interrupted
from manyhands.values.run_folder import RunDir
from tests.support.tasks import make

ODD = 'a run\'s "folder" $HOME; echo `no` &'

TASK = """
import torch
from torch import nn

import manyhands as mh

task = mh.Task(
    model=lambda: nn.Linear(2, 1),
    loss=lambda m, b: m(b["x"]).square().mean(),
    optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    data={"x": torch.ones(64, 2)},
)
config = mh.RunConfig(train=mh.TrainConfig(batch=8, steps=2))
"""


def test_the_command_that_an_interrupted_run_prints_goes_on_with_it(
    launcher: Launcher, tmp_path: Path
) -> None:
    (tmp_path / "task.py").write_text(TASK)
    run = tmp_path / ODD
    mh.train(tmp_path / "task.py", to=run, workers=1, quiet=True, launcher=launcher)
    (command,) = re.findall(r"manyhands resume .*", RunDir(run).how_to_resume())
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "manyhands").write_text(f'#!/bin/sh\nexec {sys.executable} -m manyhands "$@"\n')
    (tools / "manyhands").chmod(0o755)
    again = subprocess.run(
        ["sh", "-c", f"{command} --quiet --engine inline --set train.steps=3"],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert again.returncode == 0, again.stderr
    assert (run / "checkpoints" / "step-00000003").exists()
    assert [p.name for p in tmp_path.iterdir()].count(ODD) == 1, "nothing else was made"


def test_a_task_that_was_made_in_python_is_gone_on_with_as_told(
    launcher: Launcher, tmp_path: Path
) -> None:
    """No command can make it again: when it is interrupted, when the folder is there already, and
    when it is finished, a call is told."""
    task = make("cnn")
    run = tmp_path / ODD
    settings = ["train.batch=16", "train.steps=4"]

    def interrupt(event: object) -> None:
        raise KeyboardInterrupt

    def call(error: BaseException) -> str:
        (told,) = re.findall(r"mh\.resume\(.*?\)", str(error))
        assert "manyhands resume" not in str(error)
        return told.removesuffix(")") + ", quiet=True, launcher=launcher)"

    def begin(**more: Any) -> None:
        mh.train(task, to=run, workers=1, settings=settings, quiet=True, launcher=launcher, **more)

    names = {"mh": mh, "task": task, "launcher": launcher}
    with pytest.raises(Interrupted) as stopped:
        begin(on_step=interrupt)
    with pytest.raises(mh.RequestError) as there:
        begin()
    assert call(there.value) == call(stopped.value)
    assert eval(call(stopped.value), names).step == 4
    with pytest.raises(mh.RequestError, match="is finished") as finished:
        eval(call(stopped.value), names)
    longer = call(finished.value).replace("train.epochs=...", "train.steps=6")
    assert eval(longer, names).step == 6
