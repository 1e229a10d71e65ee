# SPDX-License-Identifier: Apache-2.0
"""Finishing the canonical sum of a stretch of the gradient, from everybody's partial sums.

Partial sums are read and never written: a step that is broken off is finished from them. Results
go to private memory that is used again and again, so that it stays in a cache.
"""

from collections.abc import Sequence

import torch

from manyhands.accounting.deal_micro_batches import Node, subtrees
from manyhands.training.state.layout import Bounds, Lanes
from manyhands.training.sync.allreduce.step_facts import StepTally
from manyhands.training.sync.canonical_sum import finish

Parts = list[tuple[Node, Lanes]]
"""Subtrees of a step's sum, in index order."""


def parts_of(slots: Sequence[Sequence[Lanes]], tally: StepTally) -> Parts:
    """Which subtree each rank's slots hold."""
    nodes = [subtrees(r, tally.leaves) for r in tally.ranges]
    return [
        (node, lanes)
        for owned, held in zip(nodes, slots, strict=True)
        for node, lanes in zip(owned, held, strict=False)
    ]


class Finisher:
    def __init__(self) -> None:
        self._rooms: list[Lanes] = []

    def room(self, k: int, like: Lanes) -> Lanes:
        """Private memory number `k`, as large as `like`."""
        while len(self._rooms) <= k:
            self._rooms.append({})
        lanes = self._rooms[k]
        for dtype, lane in like.items():
            if dtype not in lanes or len(lanes[dtype]) < len(lane):
                lanes[dtype] = torch.empty(len(lane), dtype=dtype, device=lane.device)
        return {dtype: lanes[dtype][: len(lane)] for dtype, lane in like.items()}

    def finish(self, tally: StepTally, parts: Parts, origin: Bounds, wanted: Bounds) -> Lanes:
        """The gradient of the stretch `wanted`; `parts` begin at `origin`."""
        views = [(node, _cut_out(lanes, origin, wanted)) for node, lanes in parts]
        theirs = {id(lanes) for _, lanes in views}
        rooms: list[Lanes] = []  # kept alive, so that no id is given twice

        def add(left: Lanes, right: Lanes) -> Lanes:
            if id(left) not in theirs:
                out = left
            elif id(right) not in theirs:
                out = right
            else:
                out = self.room(1 + len(rooms), left)
                rooms.append(out)
            for dtype, lane in left.items():
                torch.add(lane, right[dtype], out=out[dtype])
            return out

        total = finish(views, tally.leaves, add)
        return self.divided(total, tally.divisor)

    def divided(self, gradient: Lanes, divisor: float | None) -> Lanes:
        """In memory that may be written to; None: as it is."""
        if divisor is None:
            return gradient
        room = self.room(0, gradient)
        for dtype, lane in gradient.items():
            torch.div(lane, divisor, out=room[dtype])
        return room

    def scaled(self, gradient: Lanes, factor: float) -> Lanes:
        """Times `factor`, in memory that may be written to."""
        room = self.room(0, gradient)
        for dtype, lane in gradient.items():
            torch.mul(lane, factor, out=room[dtype])
        return room


def _cut_out(lanes: Lanes, origin: Bounds, wanted: Bounds) -> Lanes:
    """The stretch `wanted` of lanes that begin at `origin`."""
    return {d: lanes[d][a - origin[d][0] : b - origin[d][0]] for d, (a, b) in wanted.items()}
