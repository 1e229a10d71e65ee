# SPDX-License-Identifier: Apache-2.0
"""What servers have to do, in figures: counted where it happens, told with each heartbeat.

Times are counted by their size, four sizes to each doubling, from a microsecond on: percentiles are
right to within a fifth, and adding two counts up is all there is to do with them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from typing import Annotated

import msgspec
from msgspec import Meta

from manyhands.values.bounded_types import Natural, Seconds

PER_DOUBLING = 4
MOST_SIZES = 32 * PER_DOUBLING + 1
"""The last one is of an hour and more."""


def size_of_time(seconds: float) -> int:
    """Which of the counts it belongs to: the first whose `longest_s` it does not exceed."""
    size = math.ceil(PER_DOUBLING * math.log2(max(seconds * 1e6, 1.0)))
    return min(size, MOST_SIZES - 1)


def longest_s(size: int) -> float:
    return 1e-6 * 2 ** (size / PER_DOUBLING)


def percentile_s(counts: Sequence[int], part: float) -> float:
    """So long, and no longer, did this part of them take; 0 of none."""
    total = sum(counts)
    for size, seen in enumerate(accumulate(counts)):
        if total and seen >= part * total:
            return longest_s(size)
    return 0.0


class ServerLoad(msgspec.Struct, frozen=True):
    """What one server did in some stretch of time."""

    seconds: Seconds = 0.0
    share: Annotated[float, Meta(ge=0, le=1)] = 0.0
    """Of the bytes that are updated on its host: how much of them is its own, at last."""
    applied: Natural = 0
    """Pushes; steps, where all take each of them together."""
    size_bytes: Natural = 0
    """Of the gradients that were applied: its own part of each."""
    busy_s: Seconds = 0.0
    waiting: Natural = 0
    """How many more pushes lay there when one was applied, added up over all that were."""
    times: Annotated[list[Natural], Meta(max_length=MOST_SIZES)] = []
    """From a push until it was applied; for steps, how long applying one took: by their size."""

    def __add__(self, later: "ServerLoad") -> "ServerLoad":
        pairs = zip_longest(self.times, later.times, fillvalue=0)
        return ServerLoad(
            self.seconds + later.seconds,
            later.share,
            self.applied + later.applied,
            self.size_bytes + later.size_bytes,
            self.busy_s + later.busy_s,
            self.waiting + later.waiting,
            [a + b for a, b in pairs],
        )


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """The same for people: in status.json, and now and then among the events."""

    rank: int
    worker: int
    applied: int
    applied_per_s: float
    bytes_per_s: float
    share: float
    busy: float
    """Part of the time in which it applied something."""
    queue: float
    """How many more pushes lay there when one was applied, in the mean."""
    p50_s: float
    p99_s: float


def in_figures(rank: int, worker: int, load: ServerLoad) -> ServerStatus:
    seconds, applied = max(load.seconds, 1e-9), load.applied
    return ServerStatus(
        rank=rank,
        worker=worker,
        applied=applied,
        applied_per_s=applied / seconds,
        bytes_per_s=load.size_bytes / seconds,
        share=load.share,
        busy=min(1.0, load.busy_s / seconds),
        queue=load.waiting / max(1, applied),
        p50_s=percentile_s(load.times, 0.5),
        p99_s=percentile_s(load.times, 0.99),
    )
