"""What outlives a worker is never found torn, wherever in an update, or in a repair, one dies."""

import mmap
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from manyhands.training.memory import memory
from manyhands.training.memory.memory import Memory
from manyhands.training.state import layout
from manyhands.training.state.layout import lay_out, rest_of
from manyhands.training.state.undo_log import UndoLog
from manyhands.values.errors import OptimizerRefused
from tests.support.dying import NEVER, Death, Died
from tests.support.hands import Gradients, Hand, Make, crew, segment, state_of

o: Any = torch.optim


class Own(torch.optim.SGD):
    """A subclass could do anything."""


MAKERS: dict[str, Make] = {
    "adamw": lambda m: o.AdamW(m.parameters(), lr=0.01),
    "adamw fused": lambda m: o.AdamW(m.parameters(), lr=0.01, fused=True),
    "sgd momentum": lambda m: o.SGD(m.parameters(), lr=0.1, momentum=0.9),
    "adagrad": lambda m: o.Adagrad(m.parameters(), lr=0.1, initial_accumulator_value=0.1),
    "adafactor": lambda m: o.Adafactor(m.parameters(), lr=0.1),
    "a subclass": lambda m: Own(m.parameters(), lr=0.1, momentum=0.9),
}


WHOLE = {"a subclass"}
"""Those that one worker runs, in one unit."""


class Odd(nn.Module):
    """Tensors of any shapes, some in double precision, some in another order of dimensions."""

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        super().__init__()
        self.all = nn.ParameterList()
        generator = torch.Generator().manual_seed(3)
        for k, shape in enumerate(shapes):
            tensor = torch.randn(shape, generator=generator, dtype=F64 if k % 3 == 2 else F32)
            last = tensor.dim() == 4 and k % 2 == 0
            order = torch.channels_last if last else torch.contiguous_format
            self.all.append(nn.Parameter(tensor.contiguous(memory_format=order)))


F32, F64 = torch.float32, torch.float64


@pytest.fixture(scope="module", autouse=True)
def blocks_are_small() -> Iterator[None]:
    """So that small models have many of them, and many units."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "BLOCK", 32)
        patch.setattr(layout, "UNIT", 64)
        yield


DEATHS = st.builds(Death, st.none() | st.integers(0, 25), st.booleans())


@dataclass(frozen=True)
class Story:
    """Who dies where, while step `at` is being taken."""

    optimizer: str
    shapes: tuple[tuple[int, ...], ...]
    ranks: int
    at: int
    fates: list[tuple[int, Death | None]]
    """By rank: how many units it finishes, and what becomes of it in the next one; -1: already
    while it waits for the others, and then none of them begins to update."""
    menders: list[tuple[Death, int]]
    """Those who put things in order and die of it too: in the repair, or in the n-th unit."""
    later_ranks: int
    stay: bool
    """Those who lived go on, and mend; or all are new."""
    noise: Any = field(repr=False)


@st.composite
def stories(draw: st.DrawFn) -> Story:
    dimension = st.integers(1, 9)
    shapes = st.one_of(
        st.just(()),
        st.tuples(st.integers(1, 200)),
        st.tuples(st.integers(1, 20), dimension),
        st.tuples(dimension, st.integers(1, 4), st.integers(1, 3), st.integers(1, 3)),
    )
    ranks = draw(st.integers(1, 4))
    fate = st.tuples(st.integers(-1, 6), st.none() | DEATHS)
    return Story(
        optimizer=draw(st.sampled_from(sorted(MAKERS))),
        shapes=tuple(draw(st.lists(shapes, min_size=1, max_size=6))),
        ranks=ranks,
        at=draw(st.integers(0, 2)),
        fates=draw(st.lists(fate, min_size=ranks, max_size=ranks)),
        menders=draw(st.lists(st.tuples(DEATHS, st.integers(-1, 3)), max_size=2)),
        later_ranks=draw(st.integers(1, 4)),
        stay=draw(st.booleans()),
        noise=np.random.default_rng(draw(st.integers(0, 99))),
    )


def gradients(shapes: Sequence[tuple[int, ...]], step: int) -> Gradients:
    """Some parameters have none, in some steps."""
    generator = torch.Generator().manual_seed(step)
    made = [torch.randn(s, generator=generator) for s in shapes]
    return [None if (step + k) % 4 == 3 else g for k, g in enumerate(made)]


def play(story: Story) -> int:
    """How many died; whoever did, weights and state in the end are those of a calm run."""
    make, last = MAKERS[story.optimizer], story.at + 3

    def hands(count: int, fd: int) -> list[Hand]:
        return crew(count, lambda: Odd(story.shapes), make, fd)

    def go_on(hands: list[Hand], first: int, stop: int, *, fresh: bool = False) -> None:
        for rank, hand in enumerate(hands):
            hand.join(rank, len(hands), first, fresh=fresh)
        for step in range(first, stop):
            for hand in hands:
                hand.step(gradients(story.shapes, step), step)

    with segment() as calm, segment() as wild:
        (alone,) = hands(1, calm)
        alone.begin()
        go_on([alone], 0, last, fresh=True)
        first = hands(story.ranks, wild)
        first[0].begin()
        go_on(first, 0, story.at, fresh=True)
        dead = _storm(first, story)
        deaths = len(dead)
        alive = [hand for hand in first if hand not in dead] if story.stay else []
        for death, k in story.menders:
            mender = alive.pop(0) if alive else hands(1, wild)[0]
            deaths += _mend(mender, story, death, k)
        later = [*alive, *hands(story.later_ranks, wild)][: story.later_ranks]
        _mend(later[0], story)
        low, high = later[0].undo_log.steps()
        assert low == high and low in (story.at, story.at + 1)
        go_on(later, low, last)
        assert later[0].undo_log.steps() == alone.undo_log.steps() == (last, last)
        for name, ours in alone.replica.parameters.items():
            assert torch.equal(ours, later[0].replica.parameters[name]), name
        assert state_of(later) == state_of([alone])
    return deaths


def _storm(hands: list[Hand], story: Story) -> list[Hand]:
    """Step `at`, as far as it comes; who died in it."""
    dead: list[Hand] = []
    for hand, (finishes, death) in zip(hands, story.fates, strict=True):
        with (death if death and finishes < 0 else NEVER).strikes(
            hand.undo_log, story.noise
        ) as died:
            hand.optimizer.prepare(story.at)
        dead += [hand] * len(died)
    if dead:
        return dead
    for hand, (finishes, death) in zip(hands, story.fates, strict=True):
        for k in range(min(finishes, len(hand.optimizer.works))):
            hand.update(k, gradients(story.shapes, story.at), story.at)
        if death and 0 <= finishes < len(hand.optimizer.works):
            dead += [hand] * _update(hand, finishes, story, death)
    return dead


def _update(hand: Hand, k: int, story: Story, death: Death | None) -> int:
    """The k-th unit in the step in which things go wrong."""
    with (death or NEVER).strikes(hand.undo_log, story.noise) as died:
        hand.update(k, gradients(story.shapes, story.at), story.at)
    return len(died)


def _mend(hand: Hand, story: Story, death: Death | None = None, at: int = 0) -> int:
    """As `AllReduce` does it, in a view of which this is the leader."""
    with (death if death is not None and at < 0 else NEVER).strikes(hand.undo_log) as died:
        hand.undo_log.repair()
    low, high = hand.undo_log.steps()
    if died or low == high:
        return len(died)
    assert (low, high) == (story.at, story.at + 1)
    every = [u for rank in range(story.ranks) for u in hand.units_of(rank, story.ranks)]
    left = [rest_of(hand.layout, unit, hand.undo_log.done, low) for unit in every]
    behind = [unit for unit in left if unit is not None]
    hand.replica.adopt()
    hand.optimizer.regroup(0, behind, low, own=True)
    for k in range(len(behind)):
        if _update(hand, k, story, death if at == k else None):
            return 1
    return 0


@given(story=stories())
@settings(max_examples=120)
def test_whoever_dies_wherever_the_state_is_that_of_a_calm_run(story: Story) -> None:
    play(story)


@pytest.mark.parametrize("halfway", [False, True], ids=["before it", "in its middle"])
@pytest.mark.parametrize("name", ["adamw", "adagrad", "adafactor", "a subclass"])
def test_dying_at_every_store_of_an_update_and_of_a_repair(name: str, halfway: bool) -> None:
    """The first unit is copied aside while the others are waited for; when it is done, the step
    counts as begun. The other units are copied as their turn comes."""

    def story(of_update: Death, *of_repair: Death, first: int) -> Story:
        return Story(
            optimizer=name,
            shapes=((90,), (5, 9), (40,), (70,)),
            ranks=2,
            at=1,
            fates=[(first, of_update), (0, None)],
            menders=[(death, -1) for death in of_repair],
            later_ranks=3,
            stay=halfway,
            noise=np.random.default_rng(0),
        )

    def stores(first: int) -> int:
        """Until there is none left to die at."""
        return next(n for n in count() if play(story(Death(n, halfway), first=first)) == 0)

    assert stores(-1) > 3
    for first in {0} if name in WHOLE else {0, 1}:
        in_update = stores(first)
        assert in_update >= 2
        for torn in (Death(None), Death(in_update - 2)):  # garbage; and a unit declared half done
            deaths = (play(story(torn, Death(n, halfway), first=first)) for n in count())
            assert next(n for n, died in enumerate(deaths) if died == 1) > 3


# ---- boxes by parity: a write that stops half-way leaves the older one readable


class FrailMemory(mmap.mmap):
    """Memory in whose middle a writer can die."""

    dies = False

    def __setitem__(self, where: Any, value: Any) -> None:
        if self.dies:
            start, half = where.start, len(value) // 2
            super().__setitem__(slice(start, start + half), value[:half])
            raise Died
        super().__setitem__(where, value)


@pytest.fixture
def undo_log(monkeypatch: pytest.MonkeyPatch) -> Iterator[UndoLog]:
    kinds = {name: getattr(mmap, name) for name in ("MAP_SHARED", "MAP_PRIVATE", "MAP_ANONYMOUS")}
    monkeypatch.setattr(memory, "mmap", SimpleNamespace(mmap=FrailMemory, **kinds))
    monkeypatch.setattr(FrailMemory, "dies", False)
    model = Odd([(7,), (3, 3)])
    laid_out = lay_out([(n, p, True) for n, p in model.named_parameters()])
    with segment() as fd:
        shared = Memory(fd)
        weights = {d: shared.tensor(n, dtype=d) for d, n in laid_out.sizes.items()}
        buffers = {F32: 5, torch.int64: 3}
        made = UndoLog(laid_out, weights, {}, {}, buffers, shared, extras=True)
        made.reset(4)
        yield made


def values(step: int) -> dict[torch.dtype, Tensor]:
    return {F32: torch.full((5,), step + 0.5), torch.int64: torch.full((3,), 10 * step)}


def found(undo_log: UndoLog, step: int) -> dict[torch.dtype, Tensor] | None:
    into = values(-9)
    return into if undo_log.get_buffers(step, into) else None


def same(a: dict[Any, Any] | None, b: dict[Any, Any]) -> bool:
    return a is not None and a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in b)


@pytest.mark.parametrize("nth", [0, 1, 2])
def test_buffers_that_were_being_written_leave_the_older_ones(undo_log: UndoLog, nth: int) -> None:
    assert found(undo_log, 3) is None and found(undo_log, 4) is None
    for step in (4, 5):
        undo_log.put_buffers(step, values(step))
    with Death(nth).strikes(undo_log):
        undo_log.put_buffers(6, values(6))
    assert same(found(undo_log, 5), values(5))
    assert same(found(undo_log, 6), values(6)) if nth == 2 else found(undo_log, 6) is None
    assert found(undo_log, 4) is None, "its box was taken"
    undo_log.put_buffers(6, values(6))
    assert same(found(undo_log, 6), values(6)) and same(found(undo_log, 5), values(5))
    undo_log.reset(0)
    assert found(undo_log, 5) is None and found(undo_log, 6) is None


def test_a_note_that_was_being_written_leaves_the_older_one(
    undo_log: UndoLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert undo_log.get_note() is None
    undo_log.put_note(4, b"first")
    undo_log.put_note(7, b"the second, which is longer")
    assert undo_log.get_note() == (7, b"the second, which is longer")
    with monkeypatch.context() as patch, suppress(Died):
        patch.setattr(FrailMemory, "dies", True)
        undo_log.put_note(9, b"third")
    assert undo_log.get_note() == (7, b"the second, which is longer")
    undo_log.put_note(9, b"third")
    assert undo_log.get_note() == (9, b"third")
    with pytest.raises(OptimizerRefused, match="too much"):
        undo_log.put_note(9, bytes(1 << 24))
    undo_log.reset(0)
    assert undo_log.get_note() is None


def extras(step: int) -> dict[str, Any]:
    return {
        "momentum": torch.full((3, 3), float(step)),
        "count": torch.tensor(step),
        "nothing": torch.zeros(0, 4, dtype=torch.bfloat16),
        "wide": torch.arange(4 * step, dtype=F64).view(4, step),
        "on": torch.tensor([True, False]),
        "rate": 0.1 * step,
        "steps": step,
    }


def same_extras(a: dict[str, Any], b: dict[str, Any]) -> bool:
    if a.keys() != b.keys():
        return False
    return all(
        torch.equal(a[k], v) and a[k].dtype == v.dtype if isinstance(v, Tensor) else a[k] == v
        for k, v in b.items()
    )


@pytest.mark.parametrize("nth", [-1, 0, 1, 2, 3, 4, 5])
def test_extras_that_were_being_written_leave_the_older_ones(
    undo_log: UndoLog, nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """-1: in the middle of the index that precedes the tensors."""
    assert undo_log.get_extras(1, 0) == {}, "memory that nobody wrote to"
    undo_log.put_extras(1, 4, extras(4))
    undo_log.put_extras(1, 5, extras(5))
    undo_log.put_extras(0, 6, extras(60))
    with monkeypatch.context() as patch, suppress(Died):
        patch.setattr(FrailMemory, "dies", nth < 0)
        with Death(max(0, nth)).strikes(undo_log):
            undo_log.put_extras(1, 6, extras(6))
    assert same_extras(undo_log.get_extras(1, 5), extras(5))
    assert same_extras(undo_log.get_extras(1, 6), extras(6) if nth == 5 else {})
    assert undo_log.get_extras(1, 4) == {}, "its box was taken"
    assert same_extras(undo_log.get_extras(0, 6), extras(60))
    undo_log.put_extras(1, 6, extras(6))
    assert same_extras(undo_log.get_extras(1, 6), extras(6))


def test_what_is_read_is_nobodys_memory(undo_log: UndoLog) -> None:
    undo_log.put_extras(1, 4, extras(4))
    undo_log.get_extras(1, 4)["momentum"].zero_()  # type: ignore[union-attr]
    assert same_extras(undo_log.get_extras(1, 4), extras(4))
