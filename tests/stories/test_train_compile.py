"""`train.compile`: the bits of plain PyTorch that compiles, whoever computes and in which order."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

import manyhands as mh
from manyhands.accounting.ledger import read
from manyhands.accounting.ledger_lines import Computing
from manyhands.launch.engines.launcher import Launcher
from manyhands.stories.replay import replay
from manyhands.values.errors import ConfigError
from manyhands.values.kernels import COMPILED
from manyhands.values.planned_faults import FaultPlan
from manyhands.values.run_folder import RunDir
from tests.catalogue.case import adamw, classify, rows
from tests.catalogue.test_catalogue import compare


class Net(nn.Module):
    """Statistics and dropout, and sizes that an epoch's last batch makes uneven."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.dropout(F.gelu(self.norm(self.first(x))), 0.2, self.training))


def task(model: Any = Net, loss: Any = classify) -> mh.Task:
    return mh.Task(model=model, loss=loss, optimizer=adamw, data=rows())


def train(made: mh.Task, to: Path, launcher: Launcher, workers: int, *more: str, **given: Any):
    settings = ["train.batch=12", "train.micro_batch=3", "train.epochs=2", "train.seed=5"]
    settings += ["train.compile=true", *more]
    return mh.train(
        made, to=to, workers=workers, settings=settings, quiet=True, launcher=launcher, **given
    )


@pytest.mark.timeout(600)
def test_the_bits_of_plain_pytorch_that_compiles(launcher: Launcher, tmp_path: Path) -> None:
    """Killed while it compiles, audited and replayed, too."""
    file = tmp_path / "plain.safetensors"
    command = [sys.executable, "-m", "tests.support.compiled_loop", str(file)]
    subprocess.run(command, check=True, timeout=500)
    killed = FaultPlan().kill(rank=1, at_step=0, at="gather").kill(rank=0, at_step=3, at="update")
    settings = ["train.audit_every=2", "checkpoint.every_steps=2"]
    report = train(task(), tmp_path / "run", launcher, 2, *settings, faults=killed)
    compare(load_file(report.weights), load_file(file))
    assert report.recoveries == 2
    found = replay(tmp_path / "run", task(), step=3, to=6, launcher=launcher)
    assert found.same and found.compared_weights and found.otherwise is None
    computing = [e for e in read(RunDir(tmp_path / "run").ledger) if isinstance(e, Computing)]
    (kernels,) = computing[0].kernels
    assert COMPILED in kernels.marks and kernels.compiler in kernels.words


def lengths(model: nn.Module, batch: Any) -> Tensor:
    """A new shape for every record that begins a micro-batch."""
    found = model(batch["x"].repeat(1 + int(batch["i"][0]), 1))
    return found.square().mean()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_too_many_kinds_of_input_are_an_error(launcher: Launcher, tmp_path: Path) -> None:
    with pytest.raises(mh.ManyhandsError, match="more than 16 kinds of input"):
        train(task(loss=lengths), tmp_path / "run", launcher, 1, "train.micro_batch=1")


def test_a_host_without_a_compiler_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/g++")
    with pytest.raises(mh.RequestError, match=r"needs a C\+\+ compiler, and there is none here"):
        mh.train(
            task(), to=tmp_path / "run", workers=2, settings=["train.compile=true"], quiet=True
        )


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("train.portable=true", "depends on the processor"),
        ("train.checkpoint_activations=first", "as it sees fit"),
    ],
)
def test_what_does_not_go_with_it_is_refused(setting: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=why):
        mh.train(task(), to=tmp_path / "run", settings=["train.compile=true", setting])


def owned() -> Any:
    return torch.compile(Net())


def test_a_model_that_its_owner_compiled_is_trained_as_it_was(
    launcher: Launcher, tmp_path: Path
) -> None:
    runs = {"plain": Net, "owned": owned}
    prints = {
        name: train(task(made), tmp_path / name, launcher, 1, "train.compile=false").fingerprint
        for name, made in runs.items()
    }
    assert prints["plain"] == prints["owned"]
    told = {name: (tmp_path / name / "events.jsonl").read_text() for name in runs}
    assert "the model came compiled" in told["owned"]
    assert "the model came compiled" not in told["plain"]
