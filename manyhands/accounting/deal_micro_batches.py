# SPDX-License-Identifier: Apache-2.0
"""The micro-batch: the unit of determinism, and of dealing work to workers.

An epoch of `records` is a row of batches; a batch is cut into micro-batches; workers are dealt
contiguous ranges of micro-batches. Cutting knows nothing of workers, so what micro-batch *i* of
step *s* contains is the same for every number of them. Dealing may change at any step and the
result does not, because gradients are summed over one fixed tree (`train.sync.canonical`).

Everything here is arithmetic on small integers.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from manyhands.accounting.phases import Phases

Batch = Any
"""What a task's `loss` receives: for dict data a dict of tensors, else what its collation made."""

ENDLESS = 1 << 53
"""The records of an epoch of a stream whose length nobody knows: more than are ever read, and a
number that JSON and doubles hold."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One leaf of the sum: which records, and how much they count in their step."""

    step: int
    index: int
    records: int
    """How many."""
    share: float
    """Records here divided by records in the step; exactly 1.0 when it is the only one."""
    start: int
    """Its first position in the epoch."""
    batch: Batch
    read: int = 0
    """Of a stream: the digest of what was read; 0 otherwise."""


@dataclass(frozen=True, slots=True)
class Cut:
    """One step's place in the data: which positions of which epoch, and how they are cut."""

    step: int
    epoch: int
    start: int
    sizes: tuple[int, ...]
    fetched: int
    """The first step that reads this batch: random numbers that are drawn in fetching it depend on
    that one. Where there is one optimizer, the step itself."""

    @property
    def stop(self) -> int:
        return self.start + sum(self.sizes)

    def positions(self, index: int) -> range:
        """The epoch positions of micro-batch `index`."""
        first = self.start + sum(self.sizes[:index])
        return range(first, first + self.sizes[index])

    def share(self, index: int) -> float:
        return self.sizes[index] / sum(self.sizes)


@lru_cache(maxsize=64)
def cut_sizes(records: int, micro_batch: int) -> tuple[int, ...]:
    """`records` in ceil(records / micro_batch) near-equal parts, larger ones first."""
    parts = -(-records // micro_batch)
    small, larger = divmod(records, parts)
    return (small + 1,) * larger + (small,) * (parts - larger)


def steps_per_epoch(records: int, batch: int) -> int:
    """In batches. A last one of a single record joins the one before it (BatchNorm cannot train on
    one)."""
    full, rest = divmod(records, batch)
    if rest == 0 or (rest == 1 and full > 0):
        return full
    return full + 1


def cut(
    step: int, *, records: int, batch: int, micro_batch: int, phases: Phases | None = None
) -> Cut:
    """Where step `step` (from 0) reads. Batches never cross the end of an epoch."""
    per_epoch = steps_per_epoch(records, batch)
    number = phases.batch_of(step) if phases else step
    epoch, k = divmod(number, per_epoch)
    start = k * batch
    stop = records if k == per_epoch - 1 else start + batch
    first = phases.steps_before(number) if phases else step
    return Cut(step, epoch, start, cut_sizes(stop - start, micro_batch), first)


def epochs_done(
    step: int, *, records: int, batch: int, phases: Phases | None = None, micro_batch: int = 1
) -> float:
    """By the steps before `step`."""
    return (phases.batches_before(step) if phases else step) / steps_per_epoch(records, batch)


def ends_epoch(step: int, *, records: int, batch: int, phases: Phases | None = None) -> bool:
    """Whether all of an epoch is done after step `step`."""
    done = phases.batches_before(step + 1) if phases else step + 1
    whole = phases is None or phases.steps_before(done) == step + 1
    return whole and done % steps_per_epoch(records, batch) == 0


@lru_cache(maxsize=1024)
def deal(micro_batches: int, speeds: tuple[float, ...]) -> tuple[range, ...]:
    """Contiguous ranges of micro-batches, one per worker, in proportion to their speeds.

    First the time of the slowest worker is made smallest; among deals that are equally quick, the
    one with the fewest subtrees is taken, because each subtree is one gradient to exchange.
    A worker may get nothing when there are fewer micro-batches than workers; one of speed 0 gets
    none (it serves: its work is the update).
    """
    quickest = _least_time(micro_batches, speeds)
    # best[i] = fewest subtrees over which the workers so far can hold the first i micro-batches,
    # and came[k][i] = how many of them worker k then has.
    best: dict[int, int] = {0: 0}
    came: list[dict[int, int]] = []
    count = subtree_counts(micro_batches)
    # What workers from k on can hold at the most: who comes with less left undone is out.
    capacity = sum(_within(quickest, speed) for speed in speeds)
    for speed in speeds:
        following, lengths = dict[int, int](), dict[int, int]()
        most = _within(quickest, speed)
        capacity -= most
        for start, trees in best.items():
            # Ranges that are much shorter than they may be only push work to the others. Longer
            # ones first: among equals the first workers, and so the leader, have something to do.
            for length in range(most, max(0, most - 3) - 1, -1):
                stop = start + length
                if stop > micro_batches or micro_batches - stop > capacity:
                    continue
                total = trees + count(start, stop)
                if stop not in following or total < following[stop]:
                    following[stop], lengths[stop] = total, length
        best = following
        came.append(lengths)
    stop, ranges = micro_batches, list[range]()
    for lengths in reversed(came):
        ranges.append(range(stop - lengths[stop], stop))
        stop = ranges[-1].start
    return tuple(reversed(ranges))


def _least_time(micro_batches: int, speeds: tuple[float, ...]) -> float:
    """The smallest time in which all together finish all of them: it ends when one worker has
    finished a whole number of them. Found by halving, as more time never finishes less."""
    counts = Counter(speed for speed in speeds if speed > 0)

    def done(time: float) -> int:
        return sum(n * _within(time, speed) for speed, n in counts.items())

    best = math.inf
    for speed in counts:
        first, last = 1, micro_batches  # the least k for which k / speed is enough, if any is
        if done(last / speed) < micro_batches:
            continue
        while first < last:
            middle = (first + last) // 2
            if done(middle / speed) >= micro_batches:
                last = middle
            else:
                first = middle + 1
        best = min(best, first / speed)
    return best


def _within(time: float, speed: float) -> int:
    """How many micro-batches a worker of this speed finishes in `time`."""
    return int(time * speed + 1e-9)


def subtree_counts(total: int) -> Callable[[int, int], int]:
    """`len(subtrees(range(start, stop), total))` as a function of start and stop, by bits."""
    top = root(total).level

    def count(start: int, stop: int) -> int:
        # Leaves beyond the last do not exist, and count as covered.
        end, found = (1 << top if stop == total else stop), 0
        while start < stop:
            level = (start & -start).bit_length() - 1 if start else top
            while start + (1 << level) > end:
                level -= 1
            start += 1 << level
            found += 1
        return found

    return count


@dataclass(frozen=True, slots=True, order=True)
class Node:
    """The subtree that covers the leaves [start, start + 2**level) that exist."""

    start: int
    level: int

    def sibling(self) -> "Node":
        return Node(self.start ^ (1 << self.level), self.level)

    def parent(self) -> "Node":
        return Node(self.start & ~(1 << self.level), self.level + 1)


def root(leaves: int) -> Node:
    return Node(0, (leaves - 1).bit_length())


@lru_cache(maxsize=4096)
def subtrees(leaves: range, total: int) -> tuple[Node, ...]:
    """The maximal subtrees of the fixed tree over `total` leaves that lie inside `leaves`."""
    nodes: list[Node] = []
    start = leaves.start
    while start < leaves.stop:
        level = 0
        # Grow while aligned; leaves beyond `total` do not exist and count as covered.
        while start % (2 << level) == 0 and (
            start + (2 << level) <= leaves.stop or leaves.stop == total
        ):
            if Node(start, level) == root(total):
                break
            level += 1
        nodes.append(Node(start, level))
        start += 1 << level
    return tuple(nodes)
