"""What hooks of the optimizer do to weights, frozen parameters and buffers: as in a plain loop."""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import manyhands as mh
from manyhands.accounting.deal_micro_batches import cut
from manyhands.data.ordering.epoch_order import order
from manyhands.launch.engines.launcher import Launcher
from manyhands.training.compute.seeds import seed_everything
from manyhands.values.planned_faults import FaultPlan

RECORDS, BATCH, MICRO, STEPS = 40, 12, 4, 5
X = torch.randn(RECORDS, 6, generator=torch.Generator().manual_seed(1))
Y = (X.sum(1) > 0).long()


class Averaged(nn.Module):
    """A net, a running average of it as buffers and one as frozen parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
        self.slow = copy.deepcopy(self.net[3]).requires_grad_(False)
        self.register_buffer("mean", self.net[0].weight.detach().clone())
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))
        self.register_buffer("coarse", torch.zeros(3, dtype=torch.bfloat16), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


@torch.no_grad()
def average(model: Any) -> None:
    model.mean.lerp_(model.net[0].weight, 0.25)
    model.mean.add_(model.net[1].running_mean.mean(), alpha=0.01)  # merged, as all see it
    model.updates += 1
    model.coarse = model.coarse + 1  # another tensor under the same name
    for slow, fast in zip(model.slow.parameters(), model.net[3].parameters(), strict=True):
        slow.lerp_(fast, 0.1)
    model.net[3].bias.clamp_(-0.1, 0.1)


def with_post_hook(model: nn.Module) -> torch.optim.Optimizer:
    made = torch.optim.AdamW(model.parameters(), lr=0.05)
    made.register_step_post_hook(lambda *_: average(model))
    return made


def with_pre_hook(model: Any) -> torch.optim.Optimizer:
    """Gradients are looked at, and halved, before the step; the average lags behind."""
    made = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    @torch.no_grad()
    def before(*_: Any) -> None:
        model.mean.add_(model.net[0].weight.grad, alpha=0.5)
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)

    made.register_step_pre_hook(before)
    return made


def with_a_step_of_its_own(model: nn.Module) -> torch.optim.Optimizer:
    """Somebody put another function in the place of `step`."""
    made: Any = torch.optim.AdamW(model.parameters(), lr=0.05)
    own = made.step

    def step(*args: Any, **kwargs: Any) -> Any:
        found = own(*args, **kwargs)
        average(model)
        return found

    made.step = step
    return made


class Averaging(torch.optim.SGD):
    """An optimizer that does it by itself."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.1)
        self.model = model

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        average(self.model)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "post hook": with_post_hook,
    "pre hook": with_pre_hook,
    "step replaced": with_a_step_of_its_own,
    "own class": Averaging,
}


def plain(optimizer: Callable[[Any], torch.optim.Optimizer]) -> dict[str, Tensor]:
    """Plain PyTorch: every micro-batch in its order, gradients added over the same tree (of three:
    the first two, and the third), then the optimizer. Of ours only which records, which seeds."""
    seed_everything(0, "model")
    model = Averaged().train()
    made = optimizer(model)
    for step in range(STEPS):
        here = cut(step, records=RECORDS, batch=BATCH, micro_batch=MICRO)
        visits = order(0, here.epoch, RECORDS)
        taken: list[list[Tensor]] = []
        for index, size in enumerate(here.sizes):
            rows = torch.from_numpy(visits[np.array(here.positions(index))])
            seed_everything(0, step, index, "forward")
            value = loss(model, {"x": X[rows], "y": Y[rows]})
            (value * (size / sum(here.sizes))).backward()
            taken.append([p.grad for p in model.parameters() if p.grad is not None])
            made.zero_grad()
        changing = [p for p in model.parameters() if p.requires_grad]
        for parameter, parts in zip(changing, zip(*taken, strict=True), strict=True):
            parameter.grad = parts[0]
            if len(parts) > 1:
                parameter.grad = parts[0] + parts[1]
            if len(parts) > 2:
                parameter.grad = parameter.grad + parts[2]
        made.step()
        made.zero_grad()
    return dict(model.state_dict())


def task(optimizer: Callable[[Any], torch.optim.Optimizer], **more: Any) -> mh.Task:
    return mh.Task(model=Averaged, loss=loss, optimizer=optimizer, data={"x": X, "y": Y}, **more)


def trained(
    launcher: Launcher, to: Path, kind: str, workers: int, *more: str, faults: Any = None
) -> mh.Report:
    return mh.train(
        task(OPTIMIZERS[kind]),
        to=to,
        workers=workers,
        settings=[
            f"train.batch={BATCH}",
            f"train.micro_batch={MICRO}",
            f"train.steps={STEPS}",
            *more,
        ],
        quiet=True,
        launcher=launcher,
        faults=faults,
    )


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_hooks_do_what_they_do_in_a_plain_loop(
    kind: str, launcher: Launcher, tmp_path: Path
) -> None:
    expected = plain(OPTIMIZERS[kind])
    for workers in (1, 2, 3) if kind == "post hook" else (2,):
        found = load_file(trained(launcher, tmp_path / str(workers), kind, workers).weights)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            if "running" in name:  # BatchNorm's are merged in another order of roundings
                assert torch.allclose(found[name], value, atol=1e-5), name
            elif name == "mean" and kind != "pre hook":
                assert torch.allclose(found[name], value, atol=1e-6), name
            else:
                assert torch.equal(found[name], value), f"{name}, {workers} workers"


@pytest.mark.parametrize("kind", ["post hook", pytest.param("own class", marks=pytest.mark.slow)])
def test_the_same_bits_alone_over_gloo_and_through_deaths(
    kind: str, launcher: Launcher, tmp_path: Path
) -> None:
    calm = trained(launcher, tmp_path / "calm", kind, 3).fingerprint
    assert trained(launcher, tmp_path / "alone", kind, 1, "train.sync=alone").fingerprint == calm
    gloo = trained(launcher, tmp_path / "gloo", kind, 2, "train.collective=gloo")
    assert gloo.fingerprint == calm
    for at, rank in (("update", 0), ("share", 0), ("share", 1)):
        rough = trained(
            launcher,
            tmp_path / f"{at}{rank}",
            kind,
            2,
            faults=FaultPlan().kill(rank=rank, at_step=3, at=at),
        )
        assert rough.fingerprint == calm, f"rank {rank} died at {at}"


def test_a_resumed_run_goes_on_with_what_hooks_left(launcher: Launcher, tmp_path: Path) -> None:
    calm = trained(launcher, tmp_path / "calm", "post hook", 2)
    trained(launcher, tmp_path / "run", "post hook", 2, "train.steps=3")
    again = mh.resume(
        tmp_path / "run",
        task(with_post_hook),
        workers=3,
        settings=[f"train.steps={STEPS}"],
        quiet=True,
        launcher=launcher,
    )
    assert again.fingerprint == calm.fingerprint


def test_hooks_of_all_optimizers_are_called(launcher: Launcher, tmp_path: Path) -> None:
    """register_optimizer_step_post_hook: for every optimizer there is."""

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        register_optimizer_step_post_hook(lambda *_: average(model))
        return torch.optim.AdamW(model.parameters(), lr=0.05)

    settings = [f"train.batch={BATCH}", f"train.micro_batch={MICRO}", f"train.steps={STEPS}"]
    found = mh.train(
        task(optimizer),
        to=tmp_path / "run",
        workers=2,
        settings=settings,
        quiet=True,
        launcher=launcher,
    )
    assert found.fingerprint == trained(launcher, tmp_path / "x", "post hook", 2).fingerprint


class MovingAverage:
    """Called like a schedule, and does something else."""

    def __init__(self, model: Any, *, quietly: bool) -> None:
        self.model, self.quietly = model, quietly

    def step(self) -> None:
        target = self.model.mean.data if self.quietly else self.model.mean
        with torch.no_grad():
            target.mul_(0.9)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@pytest.mark.parametrize("quietly", [False, True])
def test_a_schedule_that_changes_the_model_is_refused_by_name(
    quietly: bool, launcher: Launcher, tmp_path: Path
) -> None:
    models: list[nn.Module] = []

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        models.append(model)
        return torch.optim.SGD(model.parameters(), lr=0.1)

    with pytest.raises(mh.RequestError, match=r"MovingAverage.* changed 'mean' of the model"):
        mh.train(
            task(optimizer, schedule=lambda _: MovingAverage(models[-1], quietly=quietly)),
            to=tmp_path / "run",
            workers=2,
            settings=["train.batch=12", "train.micro_batch=4", "train.steps=2"],
            quiet=True,
            launcher=launcher,
        )


def test_the_loop_above_learns_something() -> None:
    assert math.isfinite(float(plain(with_post_hook)["mean"].sum()))
    assert not torch.equal(plain(with_post_hook)["mean"], plain(Averaging)["mean"])
