"""What people are told to type is typed, into a real shell."""

import os
import re
import subprocess
import sys
from pathlib import Path

import manyhands as mh
from manyhands.launch.engines.launcher import Launcher
from manyhands.values.errors import Interrupted

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
    (command,) = re.findall(r"manyhands resume .*", str(Interrupted(str(run), 2)))
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
