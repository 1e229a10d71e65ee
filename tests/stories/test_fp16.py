"""fp16 with a loss scaler: the bits of plain PyTorch with `torch.amp.GradScaler`, by anybody."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

import manyhands as mh
from manyhands.accounting.ledger import read
from manyhands.accounting.proof import check
from manyhands.data.ordering.epoch_order import order
from manyhands.launch.engines.launcher import Launcher
from manyhands.stories.replay import replay
from manyhands.values.errors import RunFailed
from manyhands.values.planned_faults import FaultPlan
from manyhands.values.run_folder import RunDir
from tests.catalogue import reference
from tests.catalogue.case import Settings, adamw, rows

RECORDS, BATCH, MICRO, EPOCHS, SEED = 29, 12, 3, 3, 5


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.dropout(self.norm(self.first(x)).relu(), 0.2, self.training))


def loss(model: nn.Module, batch: Any) -> Tensor:
    """Large enough that the first scales are too much for fp16."""
    return 40 * F.cross_entropy(model(batch["x"]), batch["y"])


def weighted(model: nn.Module, batch: Any) -> tuple[Tensor, float]:
    return loss(model, batch), float(1 + batch["y"].sum())


def spoilt(model: Any, batch: Any) -> Tensor:
    """Now and then its gradient is NaN, whatever the scale is."""
    value = loss(model, batch)
    return value + (0 * model.first.bias.sum()).sqrt() if 4 in batch["i"] else value


def task(of: Any = loss) -> mh.Task:
    return mh.Task(model=Net, loss=of, optimizer=adamw, data=rows())


BASE = [f"train.batch={BATCH}", f"train.micro_batch={MICRO}", f"train.epochs={EPOCHS}"]
BASE += [f"train.seed={SEED}", "train.precision=fp16"]


def train(
    to: Path, launcher: Launcher, workers: int, *more: str, of: Any = loss, **given: Any
) -> mh.Report:
    settings = [*BASE, *more]
    return mh.train(
        task(of), to=to, workers=workers, settings=settings, quiet=True, launcher=launcher, **given
    )


def skipped(run: Path) -> list[int]:
    proof = check(read(RunDir(run).ledger))
    assert proof.ok
    return proof.skipped


def plain(of: Any, clip_norm: float | None) -> tuple[dict[str, Tensor], list[int]]:
    """A loop as people write it, with torch's scaler, over the same micro-batches; and which steps
    it skipped."""
    reference.seed(SEED, "model")
    model = Net().train()
    optimizer, scaler = adamw(model), torch.amp.GradScaler("cpu")
    data, step, passed = rows(), 0, list[int]()
    own = dict(model.named_buffers())
    for epoch in range(EPOCHS):
        visits = order(SEED, epoch, RECORDS)[range(RECORDS)].tolist()
        for ids in reference.batches(visits, BATCH):
            cut = reference.parts(ids, MICRO)
            before = {n: b.clone() for n, b in own.items()}
            gradients, outcomes, scales = [], [], list[float]()
            for index, part in enumerate(cut):
                reference.begin_buffers(model, own, before, alone=len(cut) == 1)
                reference.seed(SEED, step, index, "forward")
                with torch.autocast("cpu", dtype=torch.float16):
                    found = of(model, {n: c[part] for n, c in data.items()})
                value, weight = found if isinstance(found, tuple) else (found, None)
                scales.append(len(part) / len(ids) if weight is None else weight)
                scaler.scale(value * scales[-1]).backward()
                gradients.append(reference.take_gradients(model))
                outcomes.append({n: b.clone() for n, b in own.items()})
            for name, parameter in model.named_parameters():
                parameter.grad = reference.add_up([g[name] for g in gradients])
            scaler.unscale_(optimizer)
            if isinstance(found, tuple):
                for parameter in model.parameters():
                    parameter.grad /= sum(scales)
            finite = all(p.grad.isfinite().all() for p in model.parameters())
            if clip_norm is not None and finite:
                clip(model, clip_norm)
            scaler.step(optimizer)
            scaler.update()
            if finite:
                shares = [len(part) / len(ids) for part in cut]
                reference.commit_buffers(model, own, before, outcomes, shares)
            else:
                passed.append(step)
                for name, buffer in own.items():
                    buffer.copy_(before[name])
            optimizer.zero_grad()
            step += 1
    return model.state_dict(), passed


def clip(model: nn.Module, clip_norm: float) -> None:
    reference.clip(model, Settings(batch=BATCH, micro_batch=MICRO, clip_norm=clip_norm))


@pytest.mark.parametrize(
    ("of", "clip_norm", "workers"),
    [(loss, None, 2), (weighted, 0.5, 3), (spoilt, None, 1)],
    ids=["plain", "weighted-and-clipped", "spoilt"],
)
def test_the_bits_of_gradscaler(
    of: Any, clip_norm: float | None, workers: int, launcher: Launcher, tmp_path: Path
) -> None:
    clipped = [] if clip_norm is None else [f"train.clip_norm={clip_norm}"]
    report = train(tmp_path / "run", launcher, workers, *clipped, of=of)
    expected, passed = plain(of, clip_norm)
    found = load_file(report.weights)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert skipped(tmp_path / "run") == passed and 0 < len(passed) < 9


def test_whoever_computes_and_dies(launcher: Launcher, tmp_path: Path) -> None:
    """Alone, streamed between hosts and audited, and killed in steps that are skipped and taken."""
    calm = train(tmp_path / "calm", launcher, 1, "train.sync=alone").fingerprint
    first, *_ = skipped(tmp_path / "calm")
    killed = (
        FaultPlan().kill(rank=1, at_step=first, at="share").kill(rank=0, at_step=6, at="update")
    )
    runs: list[tuple[int, list[str], FaultPlan]] = [
        (2, ["train.collective=gloo", "train.audit_every=2"], FaultPlan()),
        (3, ["checkpoint.every_steps=3"], killed),
    ]
    for k, (workers, settings, faults) in enumerate(runs):
        run = tmp_path / f"run-{k}"
        report = train(run, launcher, workers, *settings, faults=faults)
        assert report.fingerprint == calm, settings
        assert skipped(run) == skipped(tmp_path / "calm")
    assert report.recoveries == 2
    found = replay(tmp_path / "run-1", task(), step=4, to=9, launcher=launcher)
    assert found.first == 3 and found.same and found.compared_weights


def test_a_resumed_run_goes_on_with_its_scale(launcher: Launcher, tmp_path: Path) -> None:
    calm = train(tmp_path / "calm", launcher, 2).fingerprint
    train(tmp_path / "run", launcher, 2, "train.epochs=1")
    again = mh.resume(
        tmp_path / "run",
        task(),
        workers=1,
        settings=[f"train.epochs={EPOCHS}"],
        quiet=True,
        launcher=launcher,
    )
    assert again.fingerprint == calm


def endless(model: nn.Module, batch: Any) -> Tensor:
    return loss(model, batch) * float("inf")


def test_a_loss_that_is_not_finite_still_ends_the_run(launcher: Launcher, tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="the loss is inf"):
        train(tmp_path / "run", launcher, 1, of=endless)
