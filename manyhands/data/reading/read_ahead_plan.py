# SPDX-License-Identifier: Apache-2.0
"""What readers do next, and when they are worth having: decisions, each a function of values.

A worker has readers; a reader has slots, each of which holds one micro-batch that it was asked for.
The worker alone asks, and it always knows the row of micro-batches that it will need: those left of
its step, then those of the next steps as work is dealt now. The deal may change at any step; what
was fetched for nothing is then dropped. Whatever a reader does not deliver the worker fetches
itself, and the bits are the same: nothing that is decided here is part of the result.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal, NamedTuple

SLOTS = 3
"""Of a reader: one that is taken, one that is ready, one in work."""

PATIENCE_S = 5.0
"""A reader that is silent for longer (and for five times what is usual) hangs."""

LOST_IN_A_ROW = 3
"""So many readers may end, with nothing delivered between, before there are none any more."""

WAITED_S = 2.0
"""Fetching has held steps up for so long before anything is done about it."""

HELD_UP = 0.2
"""... and for this part of the time."""

MOST_CHOSEN = 4
"""Readers of a worker that are started without being asked for."""


@dataclass(frozen=True, slots=True)
class FetchJob:
    """A micro-batch to fetch."""

    step: int
    index: int


SlotState = Literal["free", "asked", "ready", "dropped"]
"""dropped: the reader may still be writing to it, and nobody wants what it writes."""


@dataclass(frozen=True, slots=True)
class Slot:
    state: SlotState = "free"
    job: FetchJob | None = None


class ReadAheadMoves(NamedTuple):
    drop: list[tuple[int, int]]
    """(reader, slot): it is not wanted any more."""
    ask: list[tuple[int, int, FetchJob]]


def jobs_to_come(
    step: int, left: Sequence[int], dealt: Callable[[int], Sequence[int]], *, steps: int, most: int
) -> list[FetchJob]:
    """The next micro-batches that a worker needs, in their order: those `left` of a step, then of
    the steps after it, before step `steps`. A worker may be dealt nothing."""

    def row() -> "list[FetchJob]":
        found = [FetchJob(step, index) for index in left]
        for later in range(step + 1, min(steps, step + 1 + most)):
            if len(found) >= most:
                break
            found += [FetchJob(later, index) for index in dealt(later)]
        return found

    return list(islice(row(), most))


def next_moves(
    wanted: Sequence[FetchJob], readers: Sequence[Sequence[Slot]], own: frozenset[FetchJob]
) -> ReadAheadMoves:
    """Drop what is not wanted; ask for what is, the first first, of those who have least to do.

    `own`: what the worker fetches itself, whoever is free.
    """
    needed = set(wanted) - own
    drop: list[tuple[int, int]] = []
    held: set[FetchJob] = set()
    free: list[list[int]] = []
    load: list[int] = []
    for r, slots in enumerate(readers):
        free.append([k for k, slot in enumerate(slots) if slot.state == "free"])
        busy = 0
        for k, slot in enumerate(slots):
            if slot.state not in ("asked", "ready"):
                busy += slot.state == "dropped"
                continue
            assert slot.job is not None
            if slot.job not in needed:
                drop.append((r, k))
                if slot.state == "ready":  # nobody writes to it
                    free[r].append(k)
                else:
                    busy += 1
            else:
                held.add(slot.job)
                busy += slot.state == "asked"
        load.append(busy)
    ask: list[tuple[int, int, FetchJob]] = []
    for job in wanted:
        able = [r for r in range(len(readers)) if free[r]]
        if not able:
            break
        if job in held or job in own:
            continue
        reader = min(able, key=lambda r: load[r])
        ask.append((reader, free[reader].pop(0), job))
        load[reader] += 1
        held.add(job)
    return ReadAheadMoves(drop, ask)


RING_BATCHES = 3
"""Of a stream that one reader reads for all: the one that workers are at, the one before it, which
is computed again if somebody dies, and the next one."""


def next_batch(wanted: int, start: int, held: range) -> int | None:
    """Which batch of a stream its reader reads (or goes on with), when workers are at `wanted`;
    None: it is ahead. `held`: those that it has; the next one is `held.stop`.

    It goes on where it is, or, when `wanted` is elsewhere, begins at `start`.
    """
    if not held.start <= wanted <= held.stop:
        return start
    return held.stop if held.stop <= wanted + 1 else None


def hangs(silent_s: float, usual_s: float | None, stuck_s: float) -> bool:
    """Whether a reader has been silent for too long. Its worker is judged by others, after
    `stuck_s` and ten times the usual, and has to have done something about it by then."""
    if usual_s is None:  # nobody has fetched anything yet
        return silent_s > stuck_s / 2
    return silent_s > max(min(PATIENCE_S, stuck_s / 2), 5 * usual_s)


@dataclass(frozen=True, slots=True)
class FetchCosts:
    """Of the micro-batches that a worker has fetched itself."""

    count: int = 0
    fetch_s: float = 0.0
    fetch_cpu_s: float = 0.0
    """Of fetch_s, what its thread computed; the rest it waited."""
    rest_s: float = 0.0
    """What was done with them, and between them."""


@dataclass(frozen=True, slots=True)
class ReaderChoice:
    readers: int
    because: str


def choose_readers(
    costs: FetchCosts, *, cores: int, workers: int, threads: int
) -> ReaderChoice | None:
    """How many readers a worker gets that nobody has asked for; None: that is not known yet.

    `workers` of this host compute with `threads` each. Who waits (for a disk, for a server) can do
    so beside others; who computes needs a core that is not in use.
    """
    total = costs.fetch_s + costs.rest_s
    if costs.count < 8 or costs.fetch_s < WAITED_S:
        return None
    part = costs.fetch_s / total
    if part < HELD_UP:
        return ReaderChoice(0, f"fetching takes {part:.0%} of a step")
    useful = min(MOST_CHOSEN, math.ceil(costs.fetch_s / max(costs.rest_s, 1e-9)))
    takes = f"fetching takes {part:.0%} of a step"
    if costs.fetch_cpu_s < costs.fetch_s / 2:
        return ReaderChoice(useful, f"{takes}, most of it waiting")
    spare = (cores - workers * threads) // max(1, workers)
    if spare < 1:
        return ReaderChoice(0, f"{takes}, and no core of {cores} is left to fetch ahead")
    return ReaderChoice(min(useful, spare), f"{takes}, and cores are idle")
