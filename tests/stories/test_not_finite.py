"""A gradient that is not finite under a finite loss: never applied, named, or skipped."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.accounting.ledger import read
from manyhands.accounting.proof import check
from manyhands.launch.engines.launcher import Launcher
from manyhands.values.errors import RunFailed
from manyhands.values.planned_faults import FaultPlan
from manyhands.values.run_folder import RunDir

RECORDS, BATCH, MICRO_BATCH, BAD = 48, 16, 4, 21


class Net(nn.Module):
    """The gradient of its norm is NaN where the input is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.last = nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Linear(6, 1)
        self.scale = nn.Linear(6, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        length = self.scale(x).pow(2).sum(1, keepdim=True).sqrt()
        return self.last(self.first(self.norm(x)).relu()) + 0.01 * length


def loss(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch["x"]) - batch["y"]).pow(2).mean()


def task(bad: int | None = BAD) -> mh.Task:
    x = torch.randn(RECORDS, 6, generator=torch.Generator().manual_seed(0))
    if bad is not None:
        x[bad] = 0
    data = {"x": x, "y": x.sum(1, keepdim=True)}

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.01)

    return mh.Task(model=Net, data=data, loss=loss, optimizer=optimizer)


def train(
    made: mh.Task, to: Path, launcher: Launcher | None, workers: int, *settings: str, **more: Any
) -> mh.Report:
    shape = [f"train.batch={BATCH}", f"train.micro_batch={MICRO_BATCH}", "train.epochs=2"]
    given = {"launcher": launcher} if launcher is not None else {}
    return mh.train(
        made, to=to, workers=workers, settings=[*shape, *settings], quiet=True, **given, **more
    )


@pytest.mark.parametrize(
    ("workers", "settings"),
    [
        (1, []),
        (1, ["train.sync=alone"]),
        (2, ["train.clip_norm=0.5"]),
        (3, []),
        (2, ["train.collective=gloo"]),
    ],
)
def test_it_stops_before_the_update_and_is_named(
    workers: int, settings: list[str], launcher: Launcher, tmp_path: Path
) -> None:
    with pytest.raises(RunFailed) as failed:
        train(task(), tmp_path / "run", launcher, workers, *settings)
    verdict = failed.value.verdict
    assert "the gradient of 'scale.weight' is not finite" in verdict, verdict
    assert f" {BAD}" in verdict and "The step was not taken" in verdict


class Lengths(nn.Module):
    """The gradient of a row's length is NaN where the row counts nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.row, self.last = mh.Embedding(1000, 6, init=0.5, lr=0.01), nn.Linear(6, 1)

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        rows = self.row(ids)
        return self.last(rows) + 0.01 * (rows * x).pow(2).sum(1, keepdim=True).sqrt()


@pytest.mark.parametrize(("workers", "settings"), [(1, ["train.sync=alone"]), (2, [])])
def test_a_row_of_a_table_is_named_by_its_id(
    workers: int, settings: list[str], launcher: Launcher, tmp_path: Path
) -> None:
    made = replace(
        task(),
        model=Lengths,
        data={**task().data, "id": torch.arange(RECORDS) * 1000 - 7},
        loss=lambda m, b: (m(b["id"], b["x"]) - b["y"]).pow(2).mean(),
    )
    with pytest.raises(RunFailed) as failed:
        train(made, tmp_path / "run", launcher, workers, *settings)
    verdict = failed.value.verdict
    said = f"the gradient of table 'row' in the row of id {1000 * BAD - 7} is not finite"
    assert said in verdict, verdict
    assert f" {BAD}" in verdict.partition("(records ")[2] and "The step was not taken" in verdict


def test_skipped_steps_change_nothing_and_are_written_down(
    launcher: Launcher, tmp_path: Path
) -> None:
    found: list[tuple[str, list[int]]] = []
    runs = [(1, ["train.sync=alone"]), (1, []), (2, ["train.clip_norm=1e9"]), (3, [])]
    for k, (workers, settings) in enumerate(runs):
        run = tmp_path / f"run-{k}"
        report = train(task(), run, launcher, workers, "train.not_finite=skip", *settings)
        proof = check(read(RunDir(run).ledger))
        assert proof.ok and all(e.consumed == e.of for e in proof.epochs)
        found.append((report.fingerprint, proof.skipped))
    assert found[0][1] and all(f == found[0] for f in found), found


@pytest.mark.parametrize("moment", ["update", "share"])
def test_a_worker_dies_in_a_skipped_step(moment: str, launcher: Launcher, tmp_path: Path) -> None:
    calm = train(task(), tmp_path / "calm", launcher, 2, "train.not_finite=skip")
    (first, *_) = check(read(RunDir(tmp_path / "calm").ledger)).skipped
    faults = FaultPlan().kill(rank=1, at_step=first, at=moment)
    report = train(task(), tmp_path / "run", launcher, 2, "train.not_finite=skip", faults=faults)
    assert report.recoveries == 1 and report.fingerprint == calm.fingerprint


def huge(scale: float) -> mh.Task:
    """Of 0, with gradients near the largest number there is, or beyond it when added up."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return (model(batch["x"]) * 1e19 * (scale / 1e19)).mean()

    def model() -> nn.Module:
        made = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(made.weight)
        return made

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1e-42)

    return mh.Task(model=model, data={"x": torch.ones(32, 1)}, loss=loss, optimizer=optimizer)


@pytest.mark.parametrize("clip", [[], ["train.clip_norm=1e9"]])
def test_sums_that_might_overflow_are_looked_at_themselves(
    clip: list[str], launcher: Launcher, tmp_path: Path
) -> None:
    prints = {
        train(huge(3e38), tmp_path / f"run-{w}", launcher, w, *clip).fingerprint for w in (1, 2, 3)
    }
    assert len(prints) == 1
    for workers in (1, 2):
        with pytest.raises(RunFailed, match="add up to a number that is not finite"):
            train(huge(1e39), tmp_path / f"over-{workers}", launcher, workers, *clip)
