"""Sharing out an optimizer changes no bit of what it does."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from manyhands.training.compute.one_thread import one_thread
from manyhands.training.state import layout
from manyhands.training.state.layout import BLOCK, lay_out, parameters_of, share_out, units
from manyhands.training.state.optimizer_kinds import how_to_cut
from manyhands.training.state.param_groups import groups_from_json, groups_to_json
from manyhands.training.state.sharded_optimizer import OptimizerEntry
from manyhands.values.errors import OptimizerRefused
from tests.support.hands import Hand, Make, crew, plain_state, segment, state_of

o: Any = torch.optim
C = torch.contiguous_format

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
    built: Any = nn.Sequential(*layers)
    return built.to(memory_format=torch.channels_last)


def gradients(built: nn.Module, step: int, *, all: bool) -> list[Tensor | None]:
    """Some are None, unless `all`."""
    generator = torch.Generator().manual_seed(step)
    made = [torch.empty_like(p).normal_(generator=generator) for p in built.parameters()]
    return [None if (step + k) % 5 == 0 and not all else g for k, g in enumerate(made)]


def take_over(way: str, old: list[Hand], new: list[Hand], step: int) -> None:
    """What three workers hold after `step` steps, four go on with."""
    for hand in new:
        groups_from_json(hand.users, groups_to_json(old[0].users))
    if way == "view":  # the new ones map the same memory, and nothing is copied
        for rank, hand in enumerate(new):
            hand.join(rank, len(new), step)
        return
    for lane, saved in zip(new[0].weights.values(), old[0].weights.values(), strict=True):
        lane.copy_(saved)
    entries = [e for hand in old for e in hand.optimizer.entries()]
    entries = [OptimizerEntry(e.key, e.name, e.offset, as_saved(e.value)) for e in entries]
    new[0].undo_log.reset(step)
    for rank, hand in enumerate(new):
        hand.join(rank, len(new), step, fresh=True)
        hand.optimizer.load(entries)
        hand.optimizer.keep_extras(step)


def as_saved(value: Tensor | float) -> Tensor | float:
    """A file knows shapes, but not strides."""
    return value.clone(memory_format=C) if isinstance(value, Tensor) else value


@pytest.mark.parametrize("way", ["view", "checkpoint"])
@pytest.mark.parametrize("name", MAKERS)
def test_shares_do_what_the_whole_would(
    name: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "UNIT", 2 * BLOCK)  # more than one unit for a worker
    alone, make = model(), MAKERS[name]
    optimizer = make(alone)
    with segment() as here, segment() as there:
        hands = crew(3, model, make, here)
        hands[0].begin()
        for rank, hand in enumerate(hands):
            hand.join(rank, 3, 0, fresh=True)
        for step in range(6):
            if step == 3:
                old, hands = hands, crew(4, model, make, here if way == "view" else there)
                take_over(way, old, hands, step)
            # torch's fused SGD cannot begin with some parameters and go on with others.
            grads = gradients(alone, step, all=name == "sgd fused")
            for parameter, grad in zip(alone.parameters(), grads, strict=True):
                parameter.grad = None if grad is None else grad.clone()
            with one_thread():
                optimizer.step()
            optimizer.param_groups[0]["lr"] *= 0.9
            for hand in hands:
                hand.step(grads, step)
                hand.users.param_groups[0]["lr"] *= 0.9
            for key, ours in alone.named_parameters():
                for hand in hands:
                    assert torch.equal(ours, hand.replica.parameters[key]), f"step {step}"
        assert state_of(hands) == plain_state(optimizer, dict(alone.named_parameters()))


@pytest.mark.parametrize("name", MAKERS)
def test_a_newcomer_with_memory_of_its_own_is_brought_up_to_date(name: str) -> None:
    """As between hosts, where each holds and updates everything."""
    make = MAKERS[name]
    (old,), (new,) = crew(1, model, make, None), crew(1, model, make, None)
    old.begin()
    old.join(0, 1, 0, fresh=True)
    new.begin()
    new.join(0, 1, 0, fresh=True)  # it began at the beginning
    for step in range(5):
        if step == 3:
            for theirs, ours in zip(lanes(old), lanes(new), strict=True):
                ours.copy_(theirs)
            new.undo_log.unpack_extras(step, old.undo_log.pack_extras(step))
            new.join(0, 1, step)
        grads = gradients(old.replica.model, step, all=name == "sgd fused")
        for hand in (old, new) if step >= 3 else (old,):
            hand.step(grads, step)
    for ours, theirs in zip(lanes(new), lanes(old), strict=True):
        assert torch.equal(ours, theirs)
    assert state_of([new]) == state_of([old])


def lanes(hand: Hand) -> list[Tensor]:
    """What `AllReduce` sends to one who is behind."""
    undo_log = hand.undo_log
    return [
        *hand.weights.values(),
        *undo_log.slots.values(),
        *undo_log.scalars.values(),
        undo_log.exists,
    ]


def test_how_optimizers_are_cut() -> None:
    built = nn.Linear(4, 4)

    def hook(*given: object) -> None: ...

    def cut(optimizer: torch.optim.Optimizer) -> str:
        return how_to_cut(optimizer)[0]

    assert cut(o.AdamW(built.parameters())) == "blocks"
    assert cut(o.Adafactor(built.parameters())) == "pieces"
    assert cut(Own(built.parameters())) == "nowhere"
    hooked = o.AdamW(built.parameters())
    hooked.register_step_post_hook(hook)
    assert cut(hooked) == "nowhere"
    for refused in (o.LBFGS(built.parameters()), o.SparseAdam(built.parameters())):
        with pytest.raises(OptimizerRefused):
            how_to_cut(refused)


def test_spans_tile_the_model_and_respect_the_cut() -> None:
    laid_out = lay_out(parameters_of(model()))
    for cut in ("blocks", "pieces", "nowhere"):
        for workers in (1, 2, 3, 7):
            owners = share_out(laid_out, workers, cut=cut)
            spans = [s for owner in owners for s in owner]
            covered = [(s.piece.name, s.start, s.stop) for s in spans]
            assert sum(b - a for _, a, b in covered) == sum(p.numel for p in laid_out.trainable)
            assert covered == sorted(covered, key=lambda c: c[1])
            assert cut == "blocks" or all(s.whole for s in spans)
            assert all((s.start - s.piece.start) % BLOCK == 0 for s in spans)
            if cut == "blocks" and workers == 2:
                sizes = [sum(s.stop - s.start for s in owner) for owner in owners]
                assert max(sizes) - min(sizes) <= 2 * BLOCK


@pytest.mark.parametrize("cut", ["blocks", "pieces", "nowhere"])
@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_units_tile_what_a_worker_owns(
    cut: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "UNIT", size * BLOCK)
    laid_out = lay_out(parameters_of(model()))
    for workers in (1, 2, 3, 7):
        found = [
            u for s in share_out(laid_out, workers, cut=cut) for u in units(laid_out, s, cut=cut)
        ]
        blocks = [b for unit in found for b in range(*unit.blocks)]
        assert blocks == list(range(laid_out.first_blocks[-1])), "each block in one unit, in order"
        for unit in found:
            spans = [(p, a, b) for p, a, b in laid_out.spans_of(*unit.blocks)]
            assert spans == [(s.piece, s.start, s.stop) for s in unit.spans]
            elements = sum(b - a for _, a, b in spans)
            assert cut != "blocks" or elements <= (size + len(spans)) * BLOCK
        assert cut != "nowhere" or len(found) == 1
