# SPDX-License-Identifier: Apache-2.0
"""An average of the weights over the steps (or epochs) of a run, beside the weights themselves.

It is torch's: `AveragedModel(model, multi_avg_fn=...)` with `get_ema_multi_avg_fn(decay)` or
`get_swa_multi_avg_fn()`, to the bit. The first time the weights are copied, then each time
`average.lerp_(weights, part)`. What is not trained, and buffers, are those of the model.

It is changed in place, and a worker may be killed between any two instructions. Each block has a
word: how many steps it has been through, and how many weights are in its average, n. Each worker
has a head, as in the undo log, and room to copy what it is about to change aside:

    plan(step)    whether this step counts; written down before any block takes the step
    (the optimizer updates a unit)
    take(unit)    copy its average aside, head = its blocks and what their words say,
                  lerp in place, words = step + 1, n + 1, head = idle

Where the optimizer's pass is native, the average follows it block by block, and a block is copied
aside chunk by chunk (`follower`; one_pass_update.c).

Invariant: a block that no head names holds the average of which its word tells; one that is named
does so when what was copied aside is copied back (`repair`). Whoever then finds blocks that are
through a step that counts, while their word is not, takes it for them (`finish`): their weights
are still there, because nobody starts the next step before all have finished this one.

In private memory nothing survives its worker, so nothing is copied aside.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from manyhands.training.compute.one_thread import one_thread
from manyhands.training.memory.memory import Memory
from manyhands.training.state.followers import F32, Follower, can_follow, lerp_fma
from manyhands.training.state.layout import Bounds, Lanes, Layout, Unit
from manyhands.training.state.undo_log import HEAD_WORDS
from manyhands.values.machine import MOST_RANKS

_STEP = 32
"""Bits of a word that count weights; above them it counts steps."""
_IDLE, _HOLDS = 0, 1
_ALL = -1
"""Elements that were copied aside: all of these blocks."""

Counts = Callable[[int, bool], bool]
"""Whether a step counts, and was taken (or skipped: True)."""


@dataclass(frozen=True, slots=True)
class SavedAverage:
    """As a checkpoint holds it: of how many weights, by name."""

    count: int
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class AverageKind:
    """Which average: how it is called, which steps count, and for how much the next weights do when
    there are n in it."""

    name: str
    counts: Counts
    part: Callable[[int], float]


def moving(decay: float) -> AverageKind:
    """An exponential moving average over the steps that were taken."""
    return AverageKind("ema", lambda step, skipped: not skipped, lambda n: 1 - decay)


def equal(first: int, epoch_of: Callable[[int], int]) -> AverageKind:
    """The mean of the weights after each epoch, from the `first` (counted from 1) on."""

    def ends_epoch(step: int, skipped: bool) -> bool:
        epoch = epoch_of(step)
        return epoch + 1 >= first and epoch_of(step + 1) != epoch

    # torch divides tensors there, so in float32 whatever the weights are.
    return AverageKind("swa", ends_epoch, lambda n: float(np.float32(1) / np.float32(n + 1)))


class WeightAverage:
    def __init__(
        self, kind: AverageKind, layout: Layout, weights: Lanes, memory: Memory, *, protect: bool
    ) -> None:
        """`protect`: what modules see of it can only be read."""
        self.kind, self.name, self.layout, self.weights = kind, kind.name, layout, weights
        self.lanes: Lanes = {}
        self.shown: Lanes = {}
        """The same memory, for a module to see."""
        sizes = sorted(layout.trainable_sizes.items(), key=str)
        on_cpu = all(weights[dtype].device.type == "cpu" for dtype, _ in sizes)
        for dtype, size in sizes:
            if weights[dtype].device.type != "cpu":
                self.lanes[dtype] = self.shown[dtype] = torch.zeros_like(weights[dtype][:size])
            elif protect:
                self.lanes[dtype], self.shown[dtype] = memory.twins(size, dtype=dtype)
            else:
                self.lanes[dtype] = self.shown[dtype] = memory.tensor(size, dtype=dtype)
        self._words = cast(Any, memory.array(layout.first_blocks[-1], dtype=np.int64))
        self._planned = cast(Any, memory.array(1, dtype=np.int64))
        self._heads = cast(Any, memory.array(MOST_RANKS, HEAD_WORDS, dtype=np.int64))
        self._room = memory.shelf(MOST_RANKS, sum(_padded(n * d.itemsize) for d, n in sizes))
        self.journals = memory.shared and on_cpu
        self._asides: dict[int, Lanes] = {}
        self._stretches: dict[tuple[int, int], list[_LaneStretch]] = {}

    @property
    def count(self) -> int:
        """How many weights are in it, between steps. 0: it has not begun."""
        return self._count_of(0) if len(self._words) else 0

    def _count_of(self, block: int) -> int:
        return int(self._words[block]) & ((1 << _STEP) - 1)

    def plan(self, step: int, *, skipped: bool) -> None:
        """Before any of its blocks takes a step: whether that counts."""
        if self.kind.counts(step, skipped):
            self._planned[0] = step + 1

    def _counts(self, step: int) -> bool:
        return int(self._planned[0]) == step + 1

    def take(self, unit: Unit, step: int, rank: int) -> None:
        """The weights of this unit are those after `step`. This worker has this rank."""
        if self._counts(step):
            if unit.blocks not in self._stretches:
                self._stretches[unit.blocks] = self._stretches_of(*unit.blocks)
            self._take(*unit.blocks, step, rank, self._stretches[unit.blocks])

    def follower(self, unit: Unit, step: int, rank: int) -> list[Follower]:
        """What takes this unit within the native pass of the optimizer; none: nothing is to be
        taken, or not by it."""
        native = self.journals and can_follow(unit) and lerp_fma() is not None
        if not self._counts(step) or not native:
            return []
        before = int(self._words[unit.blocks[0]])
        count, head = self._count_of(unit.blocks[0]), self._heads[rank]
        tensors = self.weights[F32], self.lanes[F32]
        weights, lane, aside = (t.data_ptr() for t in (*tensors, self._aside(rank)[F32]))
        places = (weights, lane, head.ctypes.data, aside, self._words.ctypes.data)
        part, fma = self.kind.part(count), lerp_fma()
        return [Follower(*places, before, _word(step, count), part, count == 0, fma)]

    def _take(
        self, first: int, stop: int, step: int, rank: int, stretches: "list[_LaneStretch]"
    ) -> None:
        before, count = int(self._words[first]), self._count_of(first)
        part, head = self.kind.part(count), self._heads[rank]
        if self.journals:
            for dtype, (a, b) in _covered(stretches).items():
                self._aside(rank)[dtype][: b - a].copy_(self.lanes[dtype][a:b])
            head[1:5] = first, stop, before, _ALL
            head[0] = _HOLDS
        with torch.no_grad(), one_thread():
            for dtype, a, b in stretches:
                lane, weights = self.lanes[dtype][a:b], self.weights[dtype][a:b]
                lane.lerp_(weights, part) if count else lane.copy_(weights)
        self._words[first:stop] = _word(step, count)
        head[0] = _IDLE

    def _stretches_of(self, first: int, stop: int) -> "list[_LaneStretch]":
        return [(piece.dtype, a, b) for piece, a, b in self.layout.spans_of(first, stop)]

    def _aside(self, rank: int) -> Lanes:
        if rank not in self._asides:
            at, lanes = 0, Lanes()
            for dtype, lane in self.lanes.items():
                lanes[dtype] = self._room.tensor(rank, lane.numel(), dtype=dtype, at=at)
                at += _padded(lane.numel() * dtype.itemsize)
            self._asides[rank] = lanes
        return self._asides[rank]

    # ---- after a death

    def repair(self) -> int:
        """Copy back what killed workers were changing; how many of them there were. Idempotent."""
        torn = [rank for rank in range(MOST_RANKS) if self._heads[rank, 0] != _IDLE]
        for rank in torn:
            first, stop, before, copied = (int(n) for n in self._heads[rank, 1:5])
            for dtype, (a, b) in _covered(self._stretches_of(first, stop)).items():
                size = b - a if copied == _ALL else copied
                self.lanes[dtype][a : a + size].copy_(self._aside(rank)[dtype][:size])
            self._words[first:stop] = before
            self._heads[rank, 0] = _IDLE
        return len(torn)

    def finish(self, step: int, rank: int) -> None:
        """All weights are those after so many steps: the average comes to where they are."""
        if not self._counts(step - 1):
            return
        behind = np.flatnonzero(self._words >> _STEP < step)
        for run in np.split(behind, np.flatnonzero(np.diff(behind) > 1) + 1) if len(behind) else ():
            first, stop = int(run[0]), int(run[-1]) + 1
            self._take(first, stop, step - 1, rank, self._stretches_of(first, stop))

    # ---- to begin with

    def reset(self, step: int, saved: SavedAverage | None = None) -> None:
        """Begin after so many steps, with what was saved, or with nothing in it."""
        count = saved.count if saved is not None else 0
        if saved is not None and count:
            for piece in self.layout.trainable:
                piece.view(self.lanes[piece.dtype]).copy_(saved.tensors[piece.name])
        self.hold(step, count)

    def hold(self, step: int, count: int) -> None:
        """The lanes hold an average of so many, after so many steps."""
        self._planned[0] = 0
        self._heads[:, 0] = _IDLE
        self._words[:] = step << _STEP | count


_LaneStretch = tuple[torch.dtype, int, int]


def _word(step: int, count: int) -> int:
    """Of a block that has taken step `step`, with so many in it before."""
    return (step + 1) << _STEP | count + 1


def _covered(stretches: list[_LaneStretch]) -> Bounds:
    """From the first to the last of each lane, with the padding between them."""
    covered: Bounds = {}
    for dtype, a, b in stretches:
        covered[dtype] = (covered.get(dtype, (a, b))[0], b)
    return covered


def _padded(nbytes: int) -> int:
    return -(-nbytes // 64) * 64
