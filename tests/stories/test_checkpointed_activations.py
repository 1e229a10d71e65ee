"""Modules that compute again in backward: the bits of those that keep everything."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import manyhands as mh
from manyhands.data.ordering.epoch_order import order
from manyhands.launch.engines.launcher import Launcher
from manyhands.stories.replay import replay
from manyhands.training.compute.checkpointed_modules import checkpoint_modules
from manyhands.values.errors import ConfigError
from manyhands.values.planned_faults import FaultPlan
from tests.catalogue import reference
from tests.catalogue.case import Case, Settings, adamw, classify, rows
from tests.catalogue.test_catalogue import compare


class Block(nn.Module):
    """Statistics, a buffer that it reads and writes, and three kinds of randomness."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3)
        self.register_buffer("seen", torch.ones(8))

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        if self.training:
            self.seen = self.seen * 1.5
        kept = torch.from_numpy(np.random.random(8) < 0.8).to(x.dtype)
        return x + self.drop(self.norm(self.linear(x * kept)) * self.seen).relu() * scale


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, scale=0.5)
        return self.head(x)


class Tower(nn.Module):
    """Without state, so that plain PyTorch can checkpoint it; one weight is used twice."""

    def __init__(self, plainly: bool = False) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.part = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.2))
        self.plainly = plainly

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            if self.plainly:
                x = checkpoint(self.part, x, use_reentrant=False, preserve_rng_state=True)
            else:
                x = self.part(x)
        return self.head(x)


class Plain(Tower):
    def __init__(self) -> None:
        super().__init__(plainly=True)


BASE = ["train.batch=12", "train.micro_batch=3", "train.epochs=2"]
LAYERS = 'train.checkpoint_activations=["layers.*"]'


def trained(
    model: Any, to: Path, launcher: Launcher, workers: int, *settings: str, **more: Any
) -> mh.Report:
    task = mh.Task(model=model, loss=classify, optimizer=adamw, data=rows())
    given = [*BASE, *settings]
    return mh.train(
        task, to=to, workers=workers, settings=given, quiet=True, launcher=launcher, **more
    )


def test_the_bits_of_a_run_without_it(launcher: Launcher, tmp_path: Path) -> None:
    """By any number of workers, streamed between hosts, through a kill, resumed and replayed."""
    kept = trained(Stack, tmp_path / "kept", launcher, 2).fingerprint
    again = FaultPlan().kill(rank=1, at_step=2, at="update")
    runs: list[tuple[int, list[str], FaultPlan]] = [
        (2, ["train.collective=gloo", "train.audit_every=2"], FaultPlan()),
        (3, ["checkpoint.every_steps=2"], again),
    ]
    for k, (workers, settings, faults) in enumerate(runs):
        run = tmp_path / f"run-{k}"
        report = trained(Stack, run, launcher, workers, LAYERS, *settings, faults=faults)
        assert report.fingerprint == kept, settings
    task = mh.Task(model=Stack, loss=classify, optimizer=adamw, data=rows())
    found = replay(tmp_path / "run-1", task, step=3, to=6, launcher=launcher)
    assert found.same and found.compared_weights


def test_the_bits_of_plain_pytorch_that_checkpoints(launcher: Launcher, tmp_path: Path) -> None:
    report = trained(
        Tower, tmp_path / "run", launcher, 2, "train.seed=5", "train.checkpoint_activations=part"
    )
    case = Case("plain", "checkpoints itself", model=Plain, settings=Settings())
    expected = reference.train(case, lambda epoch: order(5, epoch, 29)[range(29)].tolist())
    compare(load_file(report.weights), expected)


def test_names_that_are_not_the_models_are_answered(launcher: Launcher, tmp_path: Path) -> None:
    with pytest.raises(mh.RequestError, match=r"no module 'layer\.0'; did you mean 'layers\.0'\?"):
        trained(Stack, tmp_path / "run", launcher, 2, "train.checkpoint_activations=layer.0")


def test_modules_are_meant_part_by_part() -> None:
    assert checkpoint_modules(Stack(), ["layers.*"]) == ["layers.0", "layers.1"]
    assert checkpoint_modules(Stack(), ["layers.?.lin*", "head"]) == [
        "layers.0.linear",
        "layers.1.linear",
        "head",
    ]
    for pattern in ("*.*.*.*", "", "Head"):
        with pytest.raises(ConfigError, match="the model has no module"):
            checkpoint_modules(Stack(), [pattern])


def test_nothing_is_kept_and_twice_backward_is_possible() -> None:
    found = []
    for patterns in ([], ["layers.*"]):
        torch.manual_seed(0)
        model = Stack()
        calls: list[int] = []
        model.layers[0].register_forward_hook(lambda *_, calls=calls: calls.append(0))
        model.layers[0].linear.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        if patterns:
            checkpoint_modules(model, patterns)
        x = torch.randn(4, 6, requires_grad=True)
        kept: list[Tensor] = []

        def keep(tensor: Tensor, kept: list[Tensor] = kept) -> Tensor:
            kept.append(tensor)
            return tensor

        reference.seed(1)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            loss = F.cross_entropy(model(x), torch.arange(4) % 3)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + slope.square().sum()).backward()
        grads = [p.grad for p in model.parameters()]
        found.append((len(kept), calls.count(0), calls.count(1), grads, model.state_dict()))
    (plain, *_, grads, state), (less, once, twice, same, same_state) = found
    assert less < plain and once == 1 and twice >= 2
    assert all(torch.equal(a, b) for a, b in zip(grads, same, strict=True))
    assert all(torch.equal(state[name], same_state[name]) for name in state)
