"""What is to be done about a call that may have been broken off, in a world of few numbers."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.training.sync.after_step import CallWords, Mending, decide


@dataclass
class World:
    """What outlives a worker. Each step adds 1 to each weight, and what follows it doubles it."""

    weights: list[int]
    aside: list[int]
    steps: list[int]
    planned: int = 0
    called: int = 0
    writing: bool = False

    @property
    def progress(self) -> CallWords:
        return CallWords(self.planned, self.called, self.writing)


def take(world: World, step: int, *, skipped: bool) -> Iterator[None]:
    """A step as workers take it; they can die wherever this yields."""
    if not skipped:
        world.planned = step + 1
        yield
    for k in range(len(world.weights)):
        if world.steps[k] == step:
            world.weights[k], world.steps[k] = world.weights[k] + (not skipped), step + 1
            yield
        if not skipped:
            world.aside[k] = world.weights[k]
            yield
    if not skipped:
        yield from call(world, step)


def call(world: World, step: int) -> Iterator[None]:
    world.called, world.writing = step + 1, True
    yield
    for k in range(len(world.weights)):
        world.weights[k] *= 2
        yield
    world.writing = False
    yield


def mend(world: World, skips: list[bool]) -> Iterator[None]:
    step = max(world.steps)
    if decide(world.progress, step) is Mending.UNDO:
        for k, weight in enumerate(world.aside):
            world.weights[k] = weight
            yield
        world.called, world.writing = step - 1, False
        yield
    for k, done in enumerate(world.steps):
        if done < step:
            world.weights[k], world.steps[k] = world.weights[k] + (not skips[done]), step
            yield
    if decide(world.progress, step) is Mending.CALL:
        for k, weight in enumerate(world.weights):
            world.aside[k] = weight
            yield
        yield from call(world, step - 1)


def live(moments: Iterator[None], count: int | None) -> None:
    """For so many moments at most."""
    for _ in islice(moments, count):
        pass


@given(
    blocks=st.integers(1, 3),
    skips=st.lists(st.booleans(), min_size=1, max_size=4),
    deaths=st.lists(st.integers(0, 14), max_size=12),
)
def test_it_is_called_once_after_each_step_whoever_dies_when(
    blocks: int, skips: list[bool], deaths: list[int]
) -> None:
    world = World([0] * blocks, [0] * blocks, [0] * blocks)
    left = iter(deaths)
    while (
        min(world.steps) < len(skips)
        or decide(world.progress, max(world.steps)) is not Mending.NOTHING
    ):
        step = min(world.steps)
        whole = step == max(world.steps) < len(skips)
        if whole and decide(world.progress, step) is Mending.NOTHING:
            live(take(world, step, skipped=skips[step]), next(left, None))
        else:
            live(mend(world, skips), next(left, None))
    expected = 0
    for skipped in skips:
        expected = expected if skipped else (expected + 1) * 2
    assert world.weights == [expected] * blocks


def test_a_call_that_writes_is_of_the_step_that_all_are_at() -> None:
    with pytest.raises(AssertionError, match="nobody goes on before it is done"):
        decide(CallWords(planned=4, step=4, writing=True), 5)
