"""Losses over the whole batch: the same bits whoever computes them, and whoever dies meanwhile.

That they are those of plain PyTorch is in the catalogue (tests/catalogue/batch_losses.py).
"""

import copy
import io
import json
import runpy
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import manyhands as mh
from manyhands.accounting import ledger
from manyhands.accounting.proof import check
from manyhands.data.ordering.epoch_order import order
from manyhands.launch.engines.launcher import Launcher
from manyhands.stories.replay import replay
from manyhands.values.errors import RequestError, RunFailed, TaskError
from manyhands.values.planned_faults import FaultPlan
from manyhands.values.run_folder import RunDir
from tests.catalogue import reference
from tests.support.tasks import ConvNet, classify, images, make

STEPS = 6
SHAPE = ["train.batch=32", "train.micro_batch=4", f"train.steps={STEPS}"]
"""Three batches of 32 records and one of 5 an epoch."""

Go = Callable[..., mh.Report]


@pytest.fixture
def go(launcher: Launcher, tmp_path: Path) -> Go:
    numbers = iter(range(99))

    def train(*settings: str, task: mh.Task | None = None, **more: Any) -> mh.Report:
        to = tmp_path / f"run-{next(numbers)}"
        given = {"workers": 3, "launcher": launcher, **more}
        return mh.train(
            task or make("towers"), to=to, settings=[*SHAPE, *settings], quiet=True, **given
        )

    return train


@pytest.fixture(scope="module")
def calm(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> mh.Report:
    to = tmp_path_factory.mktemp("calm") / "run"
    settings = [*SHAPE, "checkpoint.every_steps=2"]
    return mh.train(
        make("towers"), to=to, workers=1, settings=settings, quiet=True, launcher=launcher
    )


def events(report: mh.Report, kind: str) -> list[dict[str, Any]]:
    lines = RunDir(Path(report.run)).events.read_text().splitlines()
    return [e for e in map(json.loads, lines) if e["event"] == kind]


@pytest.mark.parametrize(
    ("workers", "settings"),
    [
        (1, ["train.sync=alone"]),
        (2, ["train.collective=gloo"]),
        (3, ["train.audit_every=1"]),
        (8, []),
        (2, ["data.readers=1"]),
    ],
)
def test_the_same_bits_however_it_is_computed(
    go: Go, calm: mh.Report, workers: int, settings: list[str]
) -> None:
    report = go(*settings, workers=workers)
    assert report.fingerprint == calm.fingerprint
    assert (report.loss, report.scores) == (calm.loss, calm.scores)


@pytest.mark.parametrize(
    ("at", "ranks", "workers"),
    [
        ("compute", [1], 3),
        ("batch_loss", [0], 3),
        ("batch_loss", [0, 1], 2),
        ("again", [2], 3),
        ("gather", [1], 2),
        ("update", [0], 3),
    ],
)
def test_workers_die_between_the_passes(
    go: Go, calm: mh.Report, at: str, ranks: list[int], workers: int
) -> None:
    faults = FaultPlan()
    for rank in ranks:
        faults = faults.kill(rank=rank, at_step=2, at=at)
    report = go(workers=workers, faults=faults)
    assert report.recoveries >= 1 and report.fingerprint == calm.fingerprint
    proof = check(ledger.read(RunDir(Path(report.run)).ledger))
    assert proof.ok, proof.problems


def test_a_worker_that_leaves_and_one_that_is_slow(go: Go, calm: mh.Report) -> None:
    faults = FaultPlan().leave(rank=1, at_step=1).slow(rank=0, at_step=0, times=3)
    assert go(faults=faults).fingerprint == calm.fingerprint


def test_a_worker_that_hangs_in_the_second_pass(go: Go, calm: mh.Report) -> None:
    faults = FaultPlan().loop(rank=1, at_step=2, at="again")
    report = go("recovery.stuck_s=1", faults=faults)
    assert report.recoveries == 1 and report.fingerprint == calm.fingerprint


def test_a_worker_that_computes_wrongly_is_named(go: Go, calm: mh.Report) -> None:
    for workers in (2, 3):
        faults = FaultPlan().corrupt(rank=1, at_step=2)
        report = go("train.audit_every=1", workers=workers, faults=faults)
        assert report.fingerprint == calm.fingerprint
        guilty = [e["guilty"] for e in events(report, "Audited") if e["guilty"]]
        assert guilty == [[1]]


def test_resumed_and_replayed(go: Go, calm: mh.Report, launcher: Launcher) -> None:
    half = go("checkpoint.every_steps=2", f"train.steps={STEPS // 2}", workers=2)
    run = Path(half.run)
    longer = mh.resume(
        run,
        make("towers"),
        settings=[f"train.steps={STEPS}"],
        workers=1,
        quiet=True,
        launcher=launcher,
    )
    assert longer.fingerprint == calm.fingerprint
    for workers in (1, 2):
        found = replay(
            Path(calm.run),
            make("towers"),
            step=2,
            to=4,
            workers=workers,
            audit=workers > 1,
            launcher=launcher,
        )
        assert found.same and found.compared_weights


def test_the_loss_is_told_once_and_sees_the_whole_batch(calm: mh.Report) -> None:
    stepped = events(calm, "Stepped")
    assert [e["numbers"]["seen"] for e in stepped if e["step"] in (1, 4)] == [32.0]
    (first,) = [e for e in stepped if e["step"] == 1]
    assert torch.tensor(first["loss"], dtype=torch.float32).item() == first["loss"]
    assert set(calm.scores) == {"loss"}


def test_what_is_seen_together_is_said_at_the_start(go: Go, calm: mh.Report) -> None:
    def notes(report: mh.Report) -> list[str]:
        return [e["text"] for e in events(report, "Warned") if "records (train." in e["text"]]

    assert notes(calm) == ["BatchNorm sees 4 records (train.micro_batch)"]
    plan = json.loads(RunDir(Path(calm.run)).plan.read_text())
    assert "batch_loss sees 32 records" in json.dumps(plan), plan
    data, few = images(n=32), "train.steps=1"
    plain = mh.Task(model=ConvNet, loss=classify, optimizer=sgd, data=data)
    seen = ["BatchNorm sees 4 records (train.micro_batch)"]
    assert notes(go(few, task=plain, workers=1)) == seen
    assert notes(go(few, "train.micro_batch=32", task=plain, workers=1)) == []
    assert notes(go(few, task=make("wide"), workers=1)) == []
    frozen = mh.Task(model=FrozenNorms, loss=classify, optimizer=sgd, data=data)
    assert notes(go(few, task=frozen, workers=1)) == [], "it goes by what it has seen before"
    forgetful = mh.Task(model=ForgetfulNorms, loss=classify, optimizer=sgd, data=data)
    assert notes(go(few, task=forgetful, workers=1)) == seen


class FrozenNorms(ConvNet):
    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.norm.eval()
        self.average.eval()
        return self


class ForgetfulNorms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm2d(3, track_running_stats=False), nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x).mean((2, 3)))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


# ---- what is not finite


def rooted(where: str) -> mh.Task:
    """Record 50 brings a NaN: into the gradient of the embeddings, or of the loss."""
    data = images()
    data["bad"] = (torch.arange(len(data["x"])) == 50).float()

    def embed(model: Any, batch: Any) -> Any:
        left = model.left(batch["x"])
        hole = batch["bad"][:, None]
        if where == "embedding":
            left = left + (left * (1 - hole)).square().sum(1, keepdim=True).sqrt()
        return left, model.right(batch["x"]), hole

    def batch_loss(model: Any, left: Tensor, right: Tensor, hole: Tensor) -> Tensor:
        value = (left - right).square().mean() * model.heat.exp()
        if where == "loss" and bool(hole.any()):
            value = value + (model.heat * 0).sqrt()
        return value / 0 if where == "value" and bool(hole.any()) else value

    return replace(make("towers"), embed=embed, batch_loss=batch_loss, data=data, held_out=None)


@pytest.mark.parametrize(
    ("where", "told"),
    [
        ("embedding", "is not finite at step"),
        ("loss", "the gradient of 'heat' is not finite"),
        ("value", "the batch loss is inf"),
    ],
)
@pytest.mark.parametrize(("workers", "settings"), [(1, ["train.sync=alone"]), (2, [])])
def test_it_stops_before_the_update_and_is_named(
    go: Go, where: str, told: str, workers: int, settings: list[str]
) -> None:
    with pytest.raises(RunFailed) as failed:
        go(*settings, task=rooted(where), workers=workers)
    verdict = failed.value.verdict
    assert told in verdict, verdict
    assert where != "embedding" or " 50" in verdict, verdict


@pytest.mark.parametrize("where", ["embedding", "loss", "value"])
def test_skipped_steps_change_nothing(go: Go, where: str) -> None:
    skip, found = "train.not_finite=skip", list[Any]()
    for workers, settings in ((1, ["train.sync=alone"]), (2, []), (3, ["train.clip_norm=1e9"])):
        report = go(skip, *settings, task=rooted(where), workers=workers)
        proof = check(ledger.read(RunDir(Path(report.run)).ledger))
        assert proof.ok
        found.append((report.fingerprint, proof.skipped))
    assert found[0][1] and all(f == found[0] for f in found), found


# ---- the debugger, scores, and what a task may say


def test_the_debugger_stops_once_in_each(
    calm: mh.Report, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("args\ncontinue\nargs\ncontinue\n"))
    found = replay(Path(calm.run), make("towers"), step=2, debug=1)
    said = capsys.readouterr().out
    assert found.same
    assert said.count("batch = {") == 1 and said.count("left = ") == 1, said


def test_held_out_batches_are_compared_within_themselves(calm: mh.Report) -> None:
    again = mh.evaluate(Path(calm.run), make("towers"))
    assert again["loss"] == calm.scores["loss"]


def nothing(model: Any, batch: Any) -> Any: ...
def one(model: Any) -> Any: ...


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"embed": nothing}, "batch_loss is missing"),
        ({"batch_loss": nothing}, "embed is missing"),
        ({"embed": nothing, "batch_loss": 3}, "batch_loss is int"),
        ({"embed": nothing, "batch_loss": nothing, "loss": nothing}, "both there"),
        ({}, "loss is missing"),
        ({"embed": nothing, "batch_loss": nothing, "optimizer": {"d": one}}, "one optimizer"),
    ],
)
def test_half_a_batch_loss_is_answered(given: dict[str, Any], told: str) -> None:
    with pytest.raises(TaskError, match=told):
        mh.Task(**{"model": ConvNet, "optimizer": sgd, "data": images(), **given})


@pytest.mark.parametrize("kind", [tuple, list, lambda two: dict(zip("ab", two, strict=True))])
def test_a_loss_that_returns_several_is_answered(go: Go, kind: Callable[[Any], Any]) -> None:
    def two(model: nn.Module, batch: Any) -> Any:
        value = classify(model, batch)
        return kind((value, value * 2))

    task = mh.Task(model=ConvNet, loss=two, optimizer=sgd, data=images())
    with pytest.raises(RequestError, match="the loss returned 2 losses"):
        go(task=task, workers=1)


# ---- the example


def by_hand(task: Any, steps: int) -> dict[str, Tensor]:
    """Plain PyTorch on the same micro-batches: one graph of the whole batch, in which every
    micro-batch has a copy of the model, so that its gradient is known by itself."""
    reference.seed(0, "model")
    model = task.model().train()
    optimizer = task.optimizer(model)
    for step in range(steps):
        ids = order(0, 0, len(task.data["upper"]))[range(step * 64, step * 64 + 64)]
        copies, made = [copy.deepcopy(model) for _ in range(8)], list[Any]()
        for index, part in enumerate(torch.as_tensor(ids).split(8)):
            reference.seed(0, step, index, "forward")
            batch = {name: column[part] for name, column in task.data.items()}
            made.append(task.embed(copies[index], batch))
        loss, _ = task.batch_loss(model, *(torch.cat(rows) for rows in zip(*made, strict=True)))
        optimizer.zero_grad()
        loss.backward()
        parts = [reference.take_gradients(each) for each in copies]
        parts[0] |= reference.take_gradients(model)
        zeros = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
        for name, parameter in model.named_parameters():
            parameter.grad = reference.add_up([part.get(name, zeros[name]) for part in parts])
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_the_example_is_its_plain_version(workers: int, launcher: Launcher, tmp_path: Path) -> None:
    path = Path(mh.__file__).parent.parent / "examples" / "14_two_towers.py"
    faults = FaultPlan().kill(rank=1, at_step=3, at="batch_loss") if workers == 3 else FaultPlan()
    report = mh.train(
        path,
        to=tmp_path / "run",
        workers=workers,
        settings=["train.steps=8"],
        quiet=True,
        faults=faults,
        launcher=launcher,
    )
    assert report.recoveries == (workers == 3)
    expected = by_hand(runpy.run_path(str(path))["task"], 8)
    found = load_file(report.weights)
    assert found.keys() == expected.keys()
    assert all(reference.same(found[name], expected[name]) for name in found)
    assert found["temperature"].item() != 2.0
