# SPDX-License-Identifier: Apache-2.0
"""An average of the weights over the steps (or epochs) of a run, beside the weights themselves.

It is torch's: `AveragedModel(model, multi_avg_fn=...)` with `get_ema_multi_avg_fn(decay)` or
`get_swa_multi_avg_fn()`, to the bit. The first time the weights are copied, then each time
`average.lerp_(weights, part)`. What is not trained, and buffers, are those of the model.

It is kept twice, so that a worker may be killed between any two instructions without a copy being
made for it. Each block has a word: how many steps it has been through, and how many weights are in
its average, n. The average is in the lane of the parity of n, and the other lane is free:

    plan(step)    whether this step counts; written down before any block takes the step
    (the optimizer updates a unit)
    take(unit)    the free lane = lerp(the other, weights), then the words = step + 1, n + 1

Invariant: a block whose word says n holds an average of n in the lane of n's parity. Whoever finds
blocks that are through a step that counts, while their word is not, takes it for them (`finish`):
their weights and the average before are both still there, because nobody starts the next step
before all have finished this one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from manyhands.training.state.layout import Lanes, Layout, Unit
from manyhands.training.state.memory import Memory
from manyhands.training.state.sharded_optimizer import one_thread

_STEP = 32
"""Bits of a word that count weights; above them it counts steps."""

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
        self._pairs: tuple[Lanes, Lanes] = {}, {}
        self._shown: tuple[Lanes, Lanes] = {}, {}
        for lanes, shown in zip(self._pairs, self._shown, strict=True):
            for dtype, size in sorted(layout.trainable_sizes.items(), key=str):
                if weights[dtype].device.type != "cpu":
                    lanes[dtype] = shown[dtype] = torch.zeros_like(weights[dtype][:size])
                elif protect:
                    lanes[dtype], shown[dtype] = memory.twins(size, dtype=dtype)
                else:
                    lanes[dtype] = shown[dtype] = memory.tensor(size, dtype=dtype)
        self._words = cast(Any, memory.array(layout.first_blocks[-1], dtype=np.int64))
        self._planned = cast(Any, memory.array(1, dtype=np.int64))

    @property
    def count(self) -> int:
        """How many weights are in it, between steps. 0: it has not begun."""
        return self._count_of(0) if len(self._words) else 0

    def _count_of(self, block: int) -> int:
        return int(self._words[block]) & ((1 << _STEP) - 1)

    def lanes(self, count: int) -> Lanes:
        """Where an average of so many is."""
        return self._pairs[count % 2]

    def shown(self) -> Lanes:
        """The average as it is between steps, for a module to see."""
        return self._shown[self.count % 2]

    def plan(self, step: int, *, skipped: bool) -> None:
        """Before any of its blocks takes a step: whether that counts."""
        if self.kind.counts(step, skipped):
            self._planned[0] = step + 1

    def take(self, unit: Unit, step: int) -> None:
        """The weights of this unit are those after `step`."""
        if int(self._planned[0]) == step + 1:
            self._take(*unit.blocks, step)

    def _take(self, first: int, stop: int, step: int) -> None:
        count = self._count_of(first)
        now, then = self.lanes(count + 1), self.lanes(count)
        part = self.kind.part(count)
        with torch.no_grad(), one_thread():
            for piece, a, b in self.layout.spans_of(first, stop):
                weights = self.weights[piece.dtype][a:b]
                if count == 0:
                    now[piece.dtype][a:b].copy_(weights)
                else:
                    torch.lerp(then[piece.dtype][a:b], weights, part, out=now[piece.dtype][a:b])
        self._words[first:stop] = (step + 1) << _STEP | count + 1

    def finish(self, step: int) -> None:
        """All weights are those after so many steps: the average comes to where they are."""
        if int(self._planned[0]) != step:
            return
        for block in range(len(self._words)):
            if int(self._words[block]) >> _STEP < step:
                self._take(block, block + 1, step - 1)

    def reset(self, step: int, saved: SavedAverage | None = None) -> None:
        """Begin after so many steps, with what was saved, or with nothing in it."""
        count = saved.count if saved is not None else 0
        if saved is not None and count:
            for piece in self.layout.trainable:
                piece.view(self.lanes(count)[piece.dtype]).copy_(saved.tensors[piece.name])
        self.hold(step, count)

    def hold(self, step: int, count: int) -> None:
        """The lanes of `count` hold an average of so many, after so many steps."""
        self._planned[0] = 0
        self._words[:] = step << _STEP | count
