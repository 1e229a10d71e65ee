"""Taking a run's model away: one call, from a folder or a report, and what cannot be is named."""

import json
import random
import shutil
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

import manyhands as mh
from manyhands.launch.engines.launcher import Launcher
from manyhands.values.errors import CheckpointMismatch, RunDirError
from tests.support.tasks import ConvNet, Tied, make

SETTINGS = ["train.batch=32", "train.micro_batch=16", "train.steps=4", "checkpoint.every_steps=2"]

FILE = """
import torch
from torch import nn
from torch.nn import functional as F
import manyhands as mh

x = torch.arange(64.0).view(32, 2) / 64
task = mh.Task(
    model=lambda: nn.Linear(2, 1),
    loss=lambda m, b: F.mse_loss(m(b["x"]), b["y"]),
    optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    data={"x": x, "y": x.sum(1, keepdim=True)},
    held_out=0.25,
    predict=lambda m, b: (m(b["x"]), b["y"]),
    scores={"mae": lambda p, t: (p - t).abs().mean()},
)
"""


def test_a_model_comes_from_a_folder_alone(launcher: Launcher, tmp_path: Path) -> None:
    (tmp_path / "line.py").write_text(FILE)
    to = tmp_path / "run"
    report = mh.train(
        tmp_path / "line.py", to=to, workers=2, settings=SETTINGS, quiet=True, launcher=launcher
    )
    torch.manual_seed(1)
    random.seed(1)
    expected = torch.rand(1), random.random()
    torch.manual_seed(1)
    random.seed(1)
    model = mh.load(to)
    assert (torch.rand(1), random.random()) == expected, "what others draw is theirs"
    assert isinstance(model, nn.Linear) and not model.training
    plain = report.load_into(nn.Linear(2, 1))
    assert torch.equal(model.weight, plain.weight) and torch.equal(model.bias, plain.bias)
    earlier = mh.load(str(to), step=2)
    assert not torch.equal(earlier.weight, model.weight)  # type: ignore[arg-type]
    again = mh.report(to)
    assert again == report and torch.equal(again.load().weight, model.weight)  # type: ignore[arg-type]
    with pytest.raises(RunDirError, match="no saved step 3; saved are: 2, 4"):
        mh.load(to, step=3)
    with pytest.raises(RunDirError, match=r"no weights 'ema'; there are: trained\."):
        mh.load(to, weights="ema")
    halved = {name: value / 2 for name, value in plain.state_dict().items()}
    save_file(halved, to / "checkpoints" / "step-00000004" / "ema.safetensors")
    assert torch.equal(mh.load(to, weights="ema").weight, plain.weight / 2)  # type: ignore[arg-type]
    with pytest.raises(RunDirError, match="no weights 'swa'; there are: trained, ema"):
        mh.load(to, weights="swa")
    shutil.move(to, tmp_path / "moved")
    assert torch.equal(mh.report(tmp_path / "moved").load().weight, plain.weight)  # type: ignore[arg-type]
    with pytest.raises(RunDirError, match="does not exist"):
        mh.load(to)


@pytest.mark.parametrize("name", ["cnn", "transformer"])
def test_a_task_of_python_loads_from_its_report(
    name: str, launcher: Launcher, tmp_path: Path
) -> None:
    task = make(name)
    report = mh.train(
        task, to=tmp_path / "run", workers=1, settings=SETTINGS, quiet=True, launcher=launcher
    )
    model = report.load()
    plain = report.load_into(ConvNet() if name == "cnn" else Tied())
    for key, value in plain.state_dict().items():
        assert torch.equal(model.state_dict()[key], value), key
    with pytest.raises(RunDirError, match="was made in Python"):
        mh.load(tmp_path / "run")
    with pytest.raises(CheckpointMismatch, match=r"belongs to another model: .*it has"):
        mh.load(tmp_path / "run", make("lstm"))


def test_a_module_that_was_given_is_left_as_it_is(launcher: Launcher, tmp_path: Path) -> None:
    """And what a model keeps outside of its state_dict comes back too."""

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(2, 1)
            self.register_buffer("mean", torch.zeros(2), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
            return self.line(x - self.mean)

    module = Counts()
    before = {k: v.clone() for k, v in module.state_dict().items()}
    x = torch.arange(128.0).view(64, 2) / 64
    task = mh.Task(
        model=module,
        loss=lambda m, b: F.mse_loss(m(b["x"]), b["y"]),
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
        data={"x": x, "y": x.sum(1, keepdim=True)},
    )
    report = mh.train(
        task, to=tmp_path / "run", workers=1, settings=SETTINGS, quiet=True, launcher=launcher
    )
    found = report.load()
    assert found is not module and found.mean.abs().sum() > 0  # type: ignore[union-attr]
    assert all(torch.equal(before[k], v) for k, v in module.state_dict().items())
    assert not torch.equal(found.line.weight, module.line.weight)  # type: ignore[union-attr]


def test_a_report_has_what_a_notebook_wants(launcher: Launcher, tmp_path: Path) -> None:
    (tmp_path / "line.py").write_text(FILE)
    to = tmp_path / "run"
    report = mh.train(
        tmp_path / "line.py",
        to=to,
        workers=1,
        settings=[*SETTINGS, "evaluate.every_steps=2", "log.every_steps=1"],
        quiet=True,
        launcher=launcher,
    )
    assert report.path == to and report.config.train.batch == 32 and report.verdict is None
    rows = report.history()
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all({"loss", "lr", "epoch"} <= row.keys() for row in rows)
    assert [("held_out/mae" in row) for row in rows] == [False, True, False, True]
    assert rows[-1]["held_out/mae"] == report.scores["mae"] and rows[-1]["loss"] == report.loss
    shown, page = repr(report), report._repr_html_()
    for text in (str(to), report.fingerprint, "held-out mae", "1 worker"):
        assert text in shown and text in page
    written = json.loads((to / "report.json").read_text())
    assert "how" not in written and msgspec.convert(written, mh.Report) == report
    by_hand = msgspec.json.decode(msgspec.json.encode(report), type=mh.Report)
    with pytest.raises(RunDirError, match=r"use mh\.load"):
        by_hand.load()
    (to / "report.json").unlink()
    with pytest.raises(RunDirError, match="it has not finished"):
        mh.report(to)
