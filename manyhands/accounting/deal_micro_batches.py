# SPDX-License-Identifier: Apache-2.0
"""The micro-batch: the unit of determinism, and of dealing work to workers.

An epoch of `records` is a row of batches; a batch is cut into micro-batches; workers are dealt
contiguous ranges of micro-batches. Cutting knows nothing of workers, so what micro-batch *i* of
step *s* contains is the same for every number of them. Dealing may change at any step and the
result does not, because gradients are summed over one fixed tree (`train.sync.canonical`).

Everything here is arithmetic on small integers.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

Batch = Any
"""What a task's `loss` receives: for dict data a dict of tensors, else what its collation made."""


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


@dataclass(frozen=True, slots=True)
class Cut:
    """One step's place in the data: which positions of which epoch, and how they are cut."""

    step: int
    epoch: int
    start: int
    sizes: tuple[int, ...]

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
    """A last batch of a single record joins the one before it (BatchNorm cannot train on one)."""
    full, rest = divmod(records, batch)
    if rest == 0 or (rest == 1 and full > 0):
        return full
    return full + 1


def cut(step: int, *, records: int, batch: int, micro_batch: int) -> Cut:
    """Where step `step` (from 0) reads. Batches never cross the end of an epoch."""
    per_epoch = steps_per_epoch(records, batch)
    epoch, k = divmod(step, per_epoch)
    start = k * batch
    stop = records if k == per_epoch - 1 else start + batch
    return Cut(step, epoch, start, cut_sizes(stop - start, micro_batch))


@lru_cache(maxsize=1024)
def deal(micro_batches: int, speeds: tuple[float, ...]) -> tuple[range, ...]:
    """Contiguous ranges of micro-batches, one per worker, in proportion to their speeds.

    First the time of the slowest worker is made smallest; among deals that are equally quick, the
    one with the fewest subtrees is taken, because each subtree is one gradient to exchange.
    A worker may get nothing when there are fewer micro-batches than workers.
    """
    quickest = min(
        k / speed
        for speed in speeds
        for k in range(1, micro_batches + 1)
        if sum(_within(k / speed, s) for s in speeds) >= micro_batches
    )
    # best[i] = fewest subtrees over which the workers so far can hold the first i micro-batches.
    best: dict[int, tuple[int, tuple[range, ...]]] = {0: (0, ())}
    for speed in speeds:
        following: dict[int, tuple[int, tuple[range, ...]]] = {}
        most = _within(quickest, speed)
        for start, (trees, ranges) in best.items():
            # Ranges that are much shorter than they may be only push work to the others. Longer
            # ones first: among equals the first workers, and so the leader, have something to do.
            for length in range(most, max(0, most - 3) - 1, -1):
                mine = range(start, start + length)
                if mine.stop > micro_batches:
                    continue
                candidate = (trees + len(subtrees(mine, micro_batches)), (*ranges, mine))
                if mine.stop not in following or candidate[0] < following[mine.stop][0]:
                    following[mine.stop] = candidate
        best = following
    return best[micro_batches][1]


def _within(time: float, speed: float) -> int:
    """How many micro-batches a worker of this speed finishes in `time`."""
    return int(time * speed + 1e-9)


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
