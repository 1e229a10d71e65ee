"""Sharing out an optimizer changes no bit of what it does."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from manyhands.errors import OptimizerRefused
from manyhands.train.layout import BLOCK, bounds, lay_out, parameters_of, share_out
from manyhands.train.memory import Memory
from manyhands.train.optim import (
    Entry,
    SharedOut,
    groups_from_json,
    groups_to_json,
    how_to_cut,
)

o: Any = torch.optim
Make = Callable[[nn.Module], torch.optim.Optimizer]

MAKERS: dict[str, Make] = {
    "adam": lambda m: o.Adam(m.parameters(), lr=0.01, amsgrad=True),
    "adam fused": lambda m: o.Adam(m.parameters(), lr=0.01, fused=True),
    "adamw": lambda m: o.AdamW(m.parameters(), lr=0.01),
    "adamw fused": lambda m: o.AdamW(m.parameters(), lr=0.01, fused=True),
    "adamw foreach": lambda m: o.AdamW(m.parameters(), lr=0.01, foreach=True),
    "sgd": lambda m: o.SGD(m.parameters(), lr=0.01),
    "sgd nesterov": lambda m: o.SGD(m.parameters(), lr=0.01, momentum=0.9, nesterov=True),
    "sgd fused": lambda m: o.SGD(m.parameters(), lr=0.01, momentum=0.9, fused=True),
    "adagrad": lambda m: o.Adagrad(m.parameters(), lr=0.01, initial_accumulator_value=0.1),
    "adagrad fused": lambda m: o.Adagrad(m.parameters(), lr=0.01, fused=True),
    "adadelta": lambda m: o.Adadelta(m.parameters()),
    "adamax": lambda m: o.Adamax(m.parameters()),
    "nadam": lambda m: o.NAdam(m.parameters(), decoupled_weight_decay=True, weight_decay=0.1),
    "radam": lambda m: o.RAdam(m.parameters()),
    "rmsprop": lambda m: o.RMSprop(m.parameters(), centered=True, momentum=0.5),
    "rprop": lambda m: o.Rprop(m.parameters()),
    "asgd": lambda m: o.ASGD(m.parameters()),
    "adafactor": lambda m: o.Adafactor(m.parameters()),
    "muon": lambda m: o.Muon([p for p in m.parameters() if p.dim() == 2]),
    "a subclass": lambda m: Own(m.parameters(), lr=0.01, momentum=0.9),
}


class Own(torch.optim.SGD):
    """A subclass could do anything."""


def model() -> nn.Module:
    torch.manual_seed(1)
    layers = [nn.Linear(257, 301), nn.ReLU(), nn.Linear(301, 5), nn.Conv2d(3, 8, 3)]
    built = nn.Sequential(*layers)
    return built.to(memory_format=torch.channels_last)


def gradients(built: nn.Module, step: int, *, all: bool) -> list[Tensor | None]:
    """Some are None, unless `all`."""
    generator = torch.Generator().manual_seed(step)
    made = [torch.empty_like(p).normal_(generator=generator) for p in built.parameters()]
    return [None if (step + k) % 5 == 0 and not all else g for k, g in enumerate(made)]


class Workers:
    """Several shares of one optimizer over the same weights, as worker processes would have."""

    def __init__(self, make: Make, count: int) -> None:
        self.built = model()
        self.users = make(self.built)
        self.layout = lay_out(parameters_of(self.built))
        cut, _ = how_to_cut(self.users)
        self.weights = {d: torch.zeros(n) for d, n in self.layout.sizes.items()}
        parameters = dict(self.built.named_parameters())
        for piece in self.layout.pieces:
            home = piece.view(self.weights[piece.dtype])
            home.copy_(parameters[piece.name].detach())
            parameters[piece.name].data = home
        self.spans = share_out(self.layout, count, cut=cut)
        self.shares = [
            SharedOut(self.users, parameters, self.layout, self.weights, spans, cut, Memory(None))
            for spans in self.spans
        ]

    def step(self, grads: list[Tensor | None]) -> None:
        whole = {d: torch.zeros(n) for d, n in self.layout.trainable_sizes.items()}
        for piece, grad in zip(self.layout.trainable, grads, strict=True):
            if grad is not None:
                piece.view(whole[piece.dtype]).copy_(grad)
        touched = [g is not None for g in grads]
        for share, spans in zip(self.shares, self.spans, strict=True):
            mine = bounds(spans)
            share.step({d: whole[d][a:b] for d, (a, b) in mine.items()}, mine, touched)
            share.release_gradients()


@pytest.mark.parametrize("name", MAKERS)
def test_shares_do_what_the_whole_would(name: str) -> None:
    alone = model()
    optimizer = MAKERS[name](alone)
    first, second = Workers(MAKERS[name], 3), Workers(MAKERS[name], 4)
    for step in range(6):
        # torch's fused SGD cannot begin with some parameters and go on with others.
        grads = gradients(alone, step, all=name == "sgd fused")
        for parameter, grad in zip(alone.parameters(), grads, strict=True):
            parameter.grad = None if grad is None else grad.clone()
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.9
        workers = first if step < 3 else second
        if step == 3:  # what three workers saved, four take over
            entries = [e for share in first.shares for e in share.entries()]
            entries = [Entry(e.key, e.name, e.offset, _copy(e.value)) for e in entries]
            for ours, theirs in zip(
                second.built.parameters(), first.built.parameters(), strict=True
            ):
                ours.data.copy_(theirs)
            groups_from_json(second.users, groups_to_json(first.users))
            for share in second.shares:
                share.load(entries)
        workers.step(grads)
        workers.users.param_groups[0]["lr"] *= 0.9
        for ours, theirs in zip(alone.parameters(), workers.built.parameters(), strict=True):
            assert torch.equal(ours, theirs), f"step {step}"


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def test_how_optimizers_are_cut() -> None:
    built = nn.Linear(4, 4)

    def cut(optimizer: torch.optim.Optimizer) -> str:
        return how_to_cut(optimizer)[0]

    assert cut(o.AdamW(built.parameters())) == "blocks"
    assert cut(o.Adafactor(built.parameters())) == "pieces"
    assert cut(Own(built.parameters())) == "nowhere"
    hooked = o.AdamW(built.parameters())
    hooked.register_step_post_hook(lambda *_: None)
    assert cut(hooked) == "nowhere"
    for refused in (o.LBFGS(built.parameters()), o.SparseAdam(built.parameters())):
        with pytest.raises(OptimizerRefused):
            how_to_cut(refused)


def test_spans_tile_the_model_and_respect_the_cut() -> None:
    layout = lay_out(parameters_of(model()))
    for cut in ("blocks", "pieces", "nowhere"):
        for workers in (1, 2, 3, 7):
            owners = share_out(layout, workers, cut=cut)
            spans = [s for owner in owners for s in owner]
            covered = [(s.piece.name, s.start, s.stop) for s in spans]
            assert sum(b - a for _, a, b in covered) == sum(p.numel for p in layout.trainable)
            assert covered == sorted(covered, key=lambda c: c[1])
            assert cut == "blocks" or all(s.whole for s in spans)
            assert all((s.start - s.piece.start) % BLOCK == 0 for s in spans)
            if cut == "blocks" and workers == 2:
                sizes = [sum(s.stop - s.start for s in owner) for owner in owners]
                assert max(sizes) - min(sizes) <= 2 * BLOCK
