# SPDX-License-Identifier: Apache-2.0
"""Several optimizers: which of them takes which step, and over which batch.

A task with optimizers d and g goes in **rounds**: in each round the phases that are due take a step
each, in their order. A phase is due in the rounds r with `r % every == offset`; in every round at
least one is. So which phase takes step s, and in which round, is arithmetic on s, the same for
whoever computes it, resumes it or replays it.

The phases of a round share its batch (`shared`), or each step takes the next batch. A batch counts
as consumed when the first phase of its round has taken its step: later phases read it again.
"""

import math
from bisect import bisect_left
from functools import lru_cache

import msgspec

from manyhands.values.task import Task


class Phases(msgspec.Struct, frozen=True):
    names: tuple[str, ...]
    every: tuple[int, ...]
    offset: tuple[int, ...]
    shared: bool = True

    def phase(self, step: int) -> str:
        """Who takes a step."""
        cycle = _cycle(self)
        return self.names[cycle[step % len(cycle)][1]]

    def batch_of(self, step: int) -> int:
        """Which batch of the run a step reads, counted from 0."""
        if not self.shared:
            return step
        cycle, period = _cycle(self), _period(self)
        times, k = divmod(step, len(cycle))
        return times * period + cycle[k][0]

    def batches_before(self, step: int) -> int:
        """How many batches the steps before this one have consumed."""
        return step if step == 0 or not self.shared else self.batch_of(step - 1) + 1

    def steps_before(self, batch: int) -> int:
        """How many steps there are before the first one that reads this batch."""
        if not self.shared:
            return batch
        cycle, period = _cycle(self), _period(self)
        times, rest = divmod(batch, period)
        return times * len(cycle) + bisect_left(cycle, (rest, 0))

    @property
    def steps_per_batch(self) -> float:
        """On average."""
        return len(_cycle(self)) / _period(self) if self.shared else 1.0

    def __str__(self) -> str:
        """In words, for people."""
        timed = zip(self.names, self.every, self.offset, strict=True)
        return ", ".join(_in_words(*each) for each in timed)


def phases_of(task: Task) -> Phases | None:
    """None: one optimizer takes every step."""
    if callable(task.optimizer) or task.optimizer is None:
        return None
    names = tuple(task.optimizer)
    return Phases(
        names,
        tuple(task.every.get(name, 1) for name in names),
        tuple(task.offset.get(name, 0) for name in names),
        task.share_batch,
    )


def _period(phases: Phases) -> int:
    return math.lcm(*phases.every)


@lru_cache(maxsize=8)
def _cycle(phases: Phases) -> list[tuple[int, int]]:
    """The steps of one period: (round, number of the phase)."""
    timed = list(zip(phases.every, phases.offset, strict=True))
    return [
        (round, k)
        for round in range(_period(phases))
        for k, (every, offset) in enumerate(timed)
        if round % every == offset
    ]


def _in_words(name: str, every: int, offset: int) -> str:
    if every == 1:
        return name
    return f"{name} (every {every} rounds{f', from round {offset}' if offset else ''})"
