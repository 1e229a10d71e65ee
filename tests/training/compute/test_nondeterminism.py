"""People are told, once, what in their model could make results differ."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.launch.engines.launcher import Launcher
from tests.support.tasks import classify, images


class Sly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(192, 5)
        self.noise = nn.Module()
        self.noise.generator = torch.Generator()
        self.dice = random.Random(3)
        self.calls = 0
        with torch.no_grad():
            self.head.bias.copy_(torch.from_numpy(np.random.default_rng().normal(size=5)))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.head(x.flatten(1))


def test_suspects_are_named(
    launcher: Launcher, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = mh.Task(
        model=Sly,
        loss=classify,
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
        data=images(),
    )
    mh.train(
        task,
        to=tmp_path / "run",
        workers=3,
        settings=["train.batch=32", "train.steps=2"],
        quiet=True,
        launcher=launcher,
    )
    said = capsys.readouterr().err.replace("\n", " ")
    assert said.count("warning:") == 4
    assert "module 'noise' (Module) has a random generator of its own, 'generator'" in said
    assert "the model (Sly) has a random generator of its own, 'dice'" in said
    assert "parameter 'head.bias' was initialised differently" in said
    assert "the model changes 'calls' in forward" in said


class Shifty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(192, 5 + int(torch.randint(0, 1, ()).item()) + _process_number())

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.flatten(1))


def _process_number() -> int:
    import os

    return os.getpid() % 97


def test_a_model_that_depends_on_its_process_is_refused(launcher: Launcher, tmp_path: Path) -> None:
    task = mh.Task(
        model=Shifty,
        loss=classify,
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
        data=images(),
    )
    with pytest.raises(mh.RequestError, match="has other tensors than rank 0's"):
        mh.train(task, to=tmp_path / "run", workers=2, quiet=True, launcher=launcher)
