# SPDX-License-Identifier: Apache-2.0
"""When to deal micro-batches anew, because workers are not equally fast: pure, from what was
measured. A deal costs a view; so it must be worth it, and where speeds change all the time, it is
tried less and less often.
"""

from collections.abc import Iterable

from manyhands.accounting.deal_micro_batches import deal
from manyhands.driver.supervise.worker_states import Situation, WorkerState

UNEVEN = "the deal is uneven: workers are not equally fast"
LEAST_GAIN = 1.1
LEAST_MEASURED_S, MOST_MEASURED_S = 2.0, 60.0


def uneven(now: Situation) -> bool:
    """Whether dealing by measured speeds would make steps at least a tenth quicker."""
    if now.view is None or now.measured_s < patience_s(now):
        return False
    pairs = zip(now.members(), now.view.speeds, strict=True)
    computing = [(worker, speed) for worker, speed in pairs if speed > 0]
    members, speeds = [w for w, _ in computing], [speed for _, speed in computing]
    times = [w.micro_batch_s for w in members]
    if len(members) < 2 or not all(times):
        return False
    return deal_time(now.micro_batches, speeds, times) > LEAST_GAIN * deal_time(
        now.micro_batches, speeds_of(members), times
    )


def patience_s(now: Situation) -> float:
    """How long to measure before the members are dealt anew. Where speeds change all the time, each
    deal in vain doubles it: the next one would be no better, and costs a view."""
    members = tuple(w.number for w in now.members())
    times = now.redealt[1] if now.redealt[0] == members else 0
    return min(MOST_MEASURED_S, LEAST_MEASURED_S * 2 ** min(times, 10))


def redealt(now: Situation) -> tuple[tuple[int, ...], int]:
    """What to remember when the members are dealt anew. A deal that held for a minute was good."""
    members = tuple(w.number for w in now.members())
    held = now.measured_s >= patience_s(now) + MOST_MEASURED_S
    in_a_row = 0 if held or now.redealt[0] != members else now.redealt[1]
    return members, in_a_row + 1


def deal_time(micro_batches: int, speeds: Iterable[float], times: Iterable[float]) -> float:
    """How long the slowest worker takes over its share."""
    ranges = deal(micro_batches, tuple(speeds))
    return max(len(r) * t for r, t in zip(ranges, times, strict=True))


def speeds_of(workers: list[WorkerState]) -> list[float]:
    """Relative to the fastest, in twentieths; one that was not measured counts as average."""
    known = sorted(w.micro_batch_s for w in workers if w.micro_batch_s > 0)
    if not known:
        return [1.0] * len(workers)
    usual = known[len(known) // 2]
    times = [w.micro_batch_s or usual for w in workers]
    return [max(0.05, round(20 * min(times) / t) / 20) for t in times]
