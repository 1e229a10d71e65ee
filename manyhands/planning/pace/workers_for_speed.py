# SPDX-License-Identifier: Apache-2.0
"""How many workers a wished speed needs, from what was measured so far: pure, no clock.

It begins with the fewest. As workers get in each other's way, n + k of them are at most (n + k) / n
times as fast as n, and n - k at least (n - k) / n times: so it grows by no more than is surely
needed, and shrinks by no more than is surely spared, and does not swing. What it costs is time: on
the way to many workers it stops to measure several times.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import mean

NEARLY = 0.98
"""Of the wished speed: good enough."""
CLEARLY = 0.9
"""Below this much of it one measurement is enough to act on; else it takes two."""
SPARE = 1.1
"""So many times the wished speed must be left with fewer workers."""
LEAST_GAIN = 0.1
"""Of the gain that more workers would bring at best: with less, they were in vain."""
MEMORY_S = 600.0
"""How long a measurement counts, and for how long workers that were in vain are not tried again."""


@dataclass(frozen=True, slots=True)
class MeasuredSpeed:
    workers: int
    samples_per_s: float
    at: float
    """When, in seconds."""


@dataclass(frozen=True, slots=True)
class WorkersChoice:
    value: int
    because: str
    enough: bool | None
    """Whether the speed is the wished one; None: it is too early to tell."""


@dataclass(slots=True)
class _Stay:
    """Measurements one after the other, with the same number of workers."""

    workers: int
    at: float
    speeds: list[float] = field(default_factory=list[float])

    @property
    def lately(self) -> float:
        return mean(self.speeds[-3:])

    @property
    def at_first(self) -> float:
        return mean(self.speeds[:2])

    @property
    def sure(self) -> bool:
        return len(self.speeds) > 1


def workers_for(
    wanted: float,
    measured: Sequence[MeasuredSpeed],
    now: float,
    least: int,
    most: int,
    *,
    by: str = "",
) -> WorkersChoice:
    """For `wanted` samples a second; `by` says whose wish that is. The last of `measured` is how
    fast those are who are there now. Asked again, it may give another answer only when something
    was measured in between, or `wanted` has changed."""
    stays = _stays(measured)
    if not stays:
        return WorkersChoice(least, "the fewest, to begin with", None)
    here = stays[-1]
    count, speed = here.workers, here.lately
    said = f"{speed:,.0f} samples/s, {speed_text(wanted)} wanted{by}"
    if not least <= count <= most:
        return WorkersChoice(min(max(count, least), most), f"{least} to {most} may be used", None)
    if speed < NEARLY * wanted:
        before = stays[-2] if len(stays) > 1 else here
        if _in_vain(before, here) and here.sure:
            fewer = max(least, before.workers)
            return WorkersChoice(fewer, f"{_workers(count)} were hardly faster: {said}", False)
        if not here.sure and (speed >= CLEARLY * wanted or _in_vain(before, here)):
            return WorkersChoice(count, said, None)
        return WorkersChoice(_more(wanted, stays, now, most), said, False if here.sure else None)
    fewer = _fewer(wanted, stays, now, least) if here.sure else count
    if fewer < count:
        return WorkersChoice(fewer, f"{_workers(fewer)} will do: {said}", True)
    return WorkersChoice(count, said, True)


def remembered(measured: Sequence[MeasuredSpeed], now: float) -> list[MeasuredSpeed]:
    """Those that still count; the last always does."""
    return [m for m in measured[:-1] if now - m.at <= MEMORY_S] + list(measured[-1:])


def _stays(measured: Sequence[MeasuredSpeed]) -> list[_Stay]:
    stays: list[_Stay] = []
    for one in measured:
        if not stays or stays[-1].workers != one.workers:
            stays.append(_Stay(one.workers, one.at))
        stays[-1].speeds.append(one.samples_per_s)
        stays[-1].at = one.at
    return stays


def _in_vain(before: _Stay, after: _Stay) -> bool:
    """Whether more workers were not worth it. By what was measured at first: later both may have
    become slower, and that would be nobody's fault."""
    if after.workers <= before.workers:
        return False
    best = after.workers / before.workers - 1
    return after.at_first < before.lately * (1 + LEAST_GAIN * best)


def _more(wanted: float, stays: list[_Stay], now: float, most: int) -> int:
    """As many as are needed if all of them were as fast as those who are there; but no more than
    twice as many, so that it is seen where more do not help."""
    here = stays[-1]
    for a, b in pairwise(stays):
        if b.workers > here.workers and now - b.at <= MEMORY_S and b.sure and _in_vain(a, b):
            most = min(most, (here.workers + b.workers) // 2)
    if here.workers >= most:
        return here.workers
    most = min(most, 2 * here.workers)
    needed = here.workers * NEARLY * wanted / max(here.lately, 1e-9)
    return most if needed >= most else max(here.workers + 1, math.ceil(needed))


def _fewer(wanted: float, stays: list[_Stay], now: float, least: int) -> int:
    """The fewest of whom it is known, or sure, that they are fast enough."""
    here = stays[-1]
    known = {s.workers: s.lately for s in stays if now - s.at <= MEMORY_S}
    count = here.workers
    while count > least:
        expected = known.get(count - 1, here.lately * (count - 1) / here.workers)
        if expected < SPARE * wanted:
            break
        count -= 1
    return count


def speed_text(wanted: float) -> str:
    return f"{wanted:,.0f}" if math.isfinite(wanted) else "more"


def _workers(count: int) -> str:
    return f"{count} worker{'s' * (count != 1)}"
