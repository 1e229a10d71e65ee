# SPDX-License-Identifier: Apache-2.0
"""Steps that were not applied one after the other, in the ledger: which of them are in.

Where workers are at different steps, `n` pushes having been applied does not mean that they were
the first `n` steps. A set of steps is written as numbers: all below the first one, then start and
stop of each run beyond it; nothing at all means the first `n`.

The proof that no step was applied twice is arithmetic: n pushes, and n different steps.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise, zip_longest

WIDEST_TOLD = 63
"""Staleness from here on is counted together."""

StepRuns = list[tuple[int, int]]
"""[start, stop) of steps, ascending, apart from each other."""


def steps_in(words: Sequence[int], pushes: int) -> StepRuns:
    """The steps that are in after so many pushes."""
    if not words:
        return [(0, pushes)] if pushes else []
    edges = [0, *words]
    pairs = [(edges[k], edges[k + 1]) for k in range(0, len(edges) - 1, 2)]
    return [(start, stop) for start, stop in pairs if start < stop]


def words_of(words: Sequence[int]) -> list[int]:
    """As short as it can be: none, if all are in before the first that is not."""
    return list(words) if len(words) > 1 else []


def problem_with(words: Sequence[int], pushes: int) -> str | None:
    """Why these are not the steps of so many pushes, if so."""
    if not words:
        return None
    ascending = all(a < b for a, b in pairwise(words))
    if len(words) % 2 == 0 or words[0] < 0 or not ascending:
        return f"{list(words)[:9]} is no set of steps."
    count = sum(stop - start for start, stop in steps_in(words, pushes))
    return None if count == pushes else f"{pushes} pushes, but {count} different steps."


def added(had: Sequence[int], first: int, has: Sequence[int], stop: int) -> StepRuns:
    """The steps that came in between `first` and `stop` pushes."""
    found: StepRuns = []
    before = steps_in(had, first)
    for start, end in steps_in(has, stop):
        for a, b in before:
            if b <= start or a >= end:
                continue
            if a > start:
                found.append((start, a))
            start = b
        if start < end:
            found.append((start, end))
    return found


def added_up(views: Iterable[Sequence[int]]) -> list[int]:
    """Counts by staleness, over views."""
    return [sum(column) for column in zip_longest(*views, fillvalue=0)]


def staleness_in_words(views: Iterable[Sequence[int]]) -> str | None:
    """How many other steps were applied between what a step read and its own application, from the
    counts of each view; None: there are none."""
    counts = added_up(views)
    if (total := sum(counts)) == 0:
        return None
    mean = sum(k * n for k, n in enumerate(counts)) / total
    seen, most = list(accumulate(counts)), len(counts) - 1
    p99 = next(k for k, n in enumerate(seen) if n >= 0.99 * total)
    more = " or more" if most >= WIDEST_TOLD else ""
    return f"{mean:.2f} steps in the mean, {p99} at the 99th percentile, at most {most}{more}"
