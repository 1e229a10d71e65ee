# SPDX-License-Identifier: Apache-2.0
"""How far workers may run apart, and which step a worker takes next.

An item of work is a step (a batch), counted from 0. Steps are dealt in order, and any worker may
take the next. Under the bound k a worker begins step s only when all steps up to s - k - 1 have
been applied to the weights that it reads. k = 0 is sync; no bound is async.

What follows from the bound: while s is under way no step later than s + k can begin, so between
what s read and its own application at most 2 k other steps are applied (k older, k newer).
No step is lost: what a lost worker had begun is dealt again before anything new.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

AT_ONCE = 255
"""Steps that may be under way at one time. Each is at most one gap in what was applied, so that
`AppliedSteps` never needs more than `MOST_WORDS` words."""

MOST_WORDS = 1 + 2 * AT_ONCE

WIDEST = 1024
"""Staleness from here on is counted together."""


@dataclass(frozen=True, slots=True)
class AppliedSteps:
    """All steps below `prefix`, and those in the runs beyond it.

    Runs are [start, stop), ascending, with at least one step missing before each: equal sets are
    equal values. There are never more runs than steps that are missing among the applied ones.
    """

    prefix: int = 0
    beyond: tuple[tuple[int, int], ...] = ()

    def covers(self, step: int) -> bool:
        return step < self.prefix or any(start <= step < stop for start, stop in self.beyond)

    def add(self, step: int) -> "AppliedSteps":
        """With `step` too; itself if it is in already."""
        if step < 0:
            raise ValueError(f"step {step}: steps are counted from 0")
        if self.covers(step):
            return self
        if step == self.prefix and not self.beyond:  # the usual case
            return AppliedSteps(step + 1)
        return _from_runs([(0, self.prefix), *self.beyond, (step, step + 1)])

    def missing(self, below: int) -> list[int]:
        """The steps below `below` that are not in."""
        return [s for s in range(self.prefix, below) if not self.covers(s)]

    @property
    def count(self) -> int:
        return self.prefix + sum(stop - start for start, stop in self.beyond)

    @property
    def words(self) -> tuple[int, ...]:
        """For JSON and for shared memory: the prefix, then start and stop of each run. Zeros after
        them mean nothing, so they may lie in a fixed number of words."""
        return (self.prefix, *(edge for run in self.beyond for edge in run))

    @staticmethod
    def from_words(words: Sequence[int]) -> "AppliedSteps":
        """Raises ValueError for words that no value has."""
        edges = list(words)
        while len(edges) > 1 and edges[-1] == 0:
            edges.pop()
        ascending = all(a < b for a, b in pairwise(edges))
        if len(edges) % 2 == 0 or edges[0] < 0 or not ascending:
            raise ValueError(f"these are no applied steps: {edges[:9]}")
        return AppliedSteps(edges[0], tuple(zip(edges[1::2], edges[2::2], strict=True)))


NO_STEPS = AppliedSteps()


def _from_runs(runs: Iterable[tuple[int, int]]) -> AppliedSteps:
    merged = [(0, 0)]
    for start, stop in sorted(runs):
        if start > merged[-1][1]:
            merged.append((start, stop))
        else:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
    return AppliedSteps(merged[0][1], tuple(merged[1:]))


def needed_below(step: int, bound: int | None) -> int:
    """All steps below this number must have been applied before `step` begins."""
    return 0 if bound is None else max(0, step - bound)


def may_begin(step: int, applied: AppliedSteps, bound: int | None) -> bool:
    """Whether weights with these steps in them are fresh enough to compute `step` on; no bound is
    None."""
    return applied.prefix >= needed_below(step, bound)


def next_step(
    claimed: int, finished: AppliedSteps, lost: Iterable[int], stop: int | None = None
) -> int | None:
    """Which step a worker takes now: the first that a lost worker had begun and nobody finished,
    else the first new one. None: there is none (now).

    `claimed` steps have been dealt so far, each once or more; `lost` are those whose worker was
    lost and that nobody has taken since; `stop` is the end of training.
    """
    again = [step for step in lost if not finished.covers(step)]
    if again:
        return min(again)
    if (stop is not None and claimed >= stop) or claimed - finished.count >= AT_ONCE:
        return None
    return claimed


@dataclass(frozen=True)
class StepDeal:
    """Who computes which step. No step is with two workers, and none is forgotten: a step below
    `claimed` is finished, with a worker, or lost and the next to be dealt."""

    claimed: int = 0
    finished: AppliedSteps = NO_STEPS
    lost: frozenset[int] = frozenset()
    holders: Mapping[int, int] = field(default_factory=lambda: {})
    """Step → worker."""

    def take(self, worker: int, stop: int | None = None) -> tuple["StepDeal", int | None]:
        """The deal after it, and the step that `worker` computes (None: nothing is left now)."""
        step = next_step(self.claimed, self.finished, self.lost, stop)
        if step is None:
            return self, None
        holders = {**self.holders, step: worker}
        deal = StepDeal(max(self.claimed, step + 1), self.finished, self.lost - {step}, holders)
        return deal, step

    def finish(self, step: int) -> "StepDeal":
        """It has been applied, whoever pushed it."""
        if step >= self.claimed:
            raise ValueError(f"step {step} was finished, but only {self.claimed} have been dealt")
        holders = {s: w for s, w in self.holders.items() if s != step}
        return StepDeal(self.claimed, self.finished.add(step), self.lost - {step}, holders)


@dataclass(frozen=True)
class StalenessCounts:
    """How many steps were computed on weights that were so many steps old: how many others were
    applied between what a step read and its own application."""

    counts: tuple[int, ...] = ()
    """At index s: of staleness s; those at `WIDEST` and above are counted at `WIDEST`."""

    def add(self, read: int, applied: int) -> "StalenessCounts":
        """A push that read version `read` of the weights and made version `applied`."""
        staleness = applied - 1 - read
        if staleness < 0:
            raise ValueError(f"version {applied} was made by a push that had read {read}")
        at = min(staleness, WIDEST)
        counts = [*self.counts, *[0] * (at + 1 - len(self.counts))]
        counts[at] += 1
        return StalenessCounts(tuple(counts))

    def __add__(self, other: "StalenessCounts") -> "StalenessCounts":
        long, short = sorted((self.counts, other.counts), key=len, reverse=True)
        added = [a + b for a, b in zip(long, short, strict=False)]
        return StalenessCounts((*added, *long[len(short) :]))

    @property
    def total(self) -> int:
        return sum(self.counts)

    @property
    def mean(self) -> float:
        return sum(s * n for s, n in enumerate(self.counts)) / max(1, self.total)

    @property
    def largest(self) -> int:
        return max(0, len(self.counts) - 1)

    def quantile(self, part: float) -> int:
        """The smallest staleness that at least `part` of the pushes did not exceed."""
        seen = 0
        for staleness, count in enumerate(self.counts):
            seen += count
            if seen >= part * self.total:
                return staleness
        return 0
