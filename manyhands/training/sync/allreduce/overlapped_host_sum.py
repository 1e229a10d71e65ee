# SPDX-License-Identifier: Apache-2.0
"""The sum of a step's gradients over hosts, bucket by bucket, while backward still goes on.

A bucket is a stretch of the gradient, a few megabytes of it; backward finishes the last parameters
first, so buckets go from the end of the model to its beginning, in one order on every host. When
all workers of a host are through with a bucket (each has a word that counts), the host's courier

    sums       its workers' partial sums, as far as the tree allows, where they lie
    exchanges  every host gets its share of the bucket from all of them,
    finishes   the tree for that share,
    shares     and all get the finished gradient, in `sums`.

As many bytes as a ring allreduce moves, when hosts hold aligned ranges. Additions are those of the
canonical tree, whatever the cut into buckets and shares: they are element by element.

`sums` holds the plain sum. Dividing it by the total weight and clipping are done by each host for
itself, from the same numbers. Once `sums` is whole the host no longer needs the others to take the
step: that is written down (`keep.summed`) before any worker may begin with it.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from manyhands.accounting.deal_micro_batches import Node, subtrees
from manyhands.training.collective.collective import stretch
from manyhands.training.collective.two_level import TwoLevel
from manyhands.training.state.layout import Bounds, Lanes, Layout
from manyhands.training.sync.canonical_sum import TreeSum, finish

PARTS, LEAST_BYTES, MOST_BYTES = 16, 256 << 10, 2 << 20
"""A bucket is a sixteenth of the gradient, within limits of what each host has of it. Larger ones
leave less to overlap, smaller ones cost more round trips."""


@dataclass(frozen=True, slots=True)
class Bucket:
    bounds: Bounds
    pieces: range
    """Of the trainable ones, those that lie in it, wholly or in part."""


def bucket_bytes(layout: Layout, hosts: int) -> int:
    total = sum(piece.numel * piece.dtype.itemsize for piece in layout.trainable)
    return min(hosts * MOST_BYTES, max(hosts * LEAST_BYTES, total // PARTS))


def buckets(layout: Layout, nbytes: int) -> list[Bucket]:
    """All trainable pieces, from the last to the first, in stretches of about `nbytes`."""
    found: list[Bucket] = []
    stop = len(layout.trainable)
    size = 0
    for k in reversed(range(len(layout.trainable))):
        piece = layout.trainable[k]
        size += piece.numel * piece.dtype.itemsize
        if size >= nbytes or k == 0:
            found += _cut(layout, range(k, stop), nbytes)
            stop, size = k, 0
    return found


def _cut(layout: Layout, pieces: range, nbytes: int) -> list[Bucket]:
    """A large piece is sent in parts, so that nobody waits for the whole of it."""
    whole: Bounds = {}
    for piece in layout.trainable[pieces.start : pieces.stop]:
        start, stop = whole.get(piece.dtype, (piece.start, piece.stop))
        whole[piece.dtype] = (min(start, piece.start), max(stop, piece.stop))
    size = sum((b - a) * dtype.itemsize for dtype, (a, b) in whole.items())
    parts = max(1, round(size / nbytes))
    return [
        Bucket({d: _share(bounds, part, parts) for d, bounds in whole.items()}, pieces)
        for part in range(parts)
    ]


def _share(bounds: tuple[int, int], part: int, parts: int) -> tuple[int, int]:
    """A near equal part of a stretch; cuts are at multiples of 16 elements from its start."""
    start, stop = bounds
    cuts = [(stop - start) * k // parts // 16 * 16 for k in (part, part + 1)]
    return start + cuts[0], stop if part == parts - 1 else start + cuts[1]


class OverlappedHostSum:
    """One view's use of it."""

    def __init__(self, layout: Layout, levels: TwoLevel, sums: Lanes) -> None:
        self.levels, self.sums, self.world = levels, sums, levels.world
        self.buckets = buckets(layout, bucket_bytes(layout, self.world.num_hosts))
        self.owned: list[list[Bounds]] = [
            [
                {d: _share(s, host, self.world.num_hosts) for d, s in bucket.bounds.items()}
                for host in range(self.world.num_hosts)
            ]
            for bucket in self.buckets
        ]
        self._buckets_of = [
            [k for k, bucket in enumerate(self.buckets) if piece in bucket.pieces]
            for piece in range(len(layout.trainable))
        ]
        self._words = levels.readiness()
        self._steps = 0
        self._waiting: list[int] = []
        self._ready = 0

    def begin(self, ranges: Sequence[range], leaves: int, whole: Callable[[], None]) -> None:
        """A step in which the workers compute these micro-batches, by rank. `whole` is called when
        all of the sum is here."""
        self._waiting = [len(bucket.pieces) for bucket in self.buckets]
        self._ready = 0
        first = self._steps * len(self.buckets)
        self._steps += 1
        if self.levels.between is not None:
            self.levels.send(partial(self._reduce, first, ranges, leaves, whole))

    def finished(self, piece: int) -> None:
        """This worker has nothing more to add to a piece."""
        for k in self._buckets_of[piece]:
            self._waiting[k] -= 1
        before = self._ready
        while self._ready < len(self.buckets) and self._waiting[self._ready] == 0:
            self._ready += 1
        if self._ready > before:
            self._words.reach((self._steps - 1) * len(self.buckets) + self._ready)

    def everything(self) -> None:
        """This worker has nothing more to add at all."""
        self._ready = len(self.buckets)
        self._words.reach(self._steps * len(self.buckets))

    # ---- by the courier

    def _reduce(
        self, first: int, ranges: Sequence[range], leaves: int, whole: Callable[[], None]
    ) -> None:
        world, between = self.world, self.levels.between
        assert between is not None
        of_hosts = [_union(ranges[r] for r in world.ranks_of(h)) for h in range(world.num_hosts)]
        nodes = [subtrees(r, leaves) for r in of_hosts]
        counts = [len(n) for n in nodes]
        here = [
            (node, slot)
            for k, rank in enumerate(world.ranks_of(world.host))
            for node, slot in zip(subtrees(ranges[rank], leaves), self._slots_of(k), strict=False)
        ]
        for k, (bucket, owned) in enumerate(zip(self.buckets, self.owned, strict=True)):
            self._words.wait_until(first + k + 1)
            between.slots = [lanes for _, lanes in _sum_in_place(here, bucket.bounds, leaves)]
            parts = between.exchange(counts, owned)
            mine = stretch(self.sums, owned[world.host])
            self._finish(_pairs(nodes, parts), leaves, mine)
            between.share(self.sums, owned)
        whole()

    def _slots_of(self, local_rank: int) -> Sequence[Lanes]:
        levels = self.levels
        return levels.slots if local_rank == levels.world.local_rank else levels.left_by(local_rank)

    def _finish(self, parts: list[tuple[Node, Lanes]], leaves: int, out: Lanes) -> None:
        theirs = {id(lanes) for _, lanes in parts}

        def add(left: Lanes, right: Lanes) -> Lanes:
            """Into memory of our own: what others sent is not written to."""
            if id(left) not in theirs:
                target = left
            elif id(right) not in theirs:
                target = right
            elif len(parts) == 2:
                target = out
            else:
                target = {d: torch.empty_like(lane) for d, lane in left.items()}
            for dtype, lane in left.items():
                torch.add(lane, right[dtype], out=target[dtype])
            made.append(target)
            return target

        made: list[Lanes] = []  # kept alive, so that no id is given twice
        total = finish(parts, leaves, add)
        if total is not out:
            for dtype, lane in total.items():
                out[dtype].copy_(lane)


def _union(ranges: Iterable[range]) -> range:
    """Neighbouring ranges as one; empty ones do not count."""
    held = [r for r in ranges if r]
    return range(held[0].start, held[-1].stop) if held else range(0)


def _sum_in_place(
    here: Sequence[tuple[Node, Lanes]], bounds: Bounds, leaves: int
) -> list[tuple[Node, Lanes]]:
    """The host's own subtrees of a stretch; each lies where the leftmost of its parts lay."""

    def add(left: Lanes, right: Lanes) -> Lanes:
        for dtype, (a, b) in bounds.items():
            left[dtype][a:b].add_(right[dtype][a:b])
        return left

    tree = TreeSum(leaves, add)
    for node, lanes in here:
        tree.push(node, lanes)
    return tree.parts


def _pairs(
    nodes: Sequence[Sequence[Node]], parts: Sequence[Sequence[Lanes]]
) -> list[tuple[Node, Lanes]]:
    """Which subtree each part is."""
    return [
        pair
        for of_host, received in zip(nodes, parts, strict=True)
        for pair in zip(of_host, received, strict=True)
    ]
