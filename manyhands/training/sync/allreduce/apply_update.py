# SPDX-License-Identifier: Apache-2.0
"""From everybody's partial sums to new weights: finish the tree, clip, run the optimizer.

It goes unit by unit, each under the optimizer's undo log, and is the same for a step that is taken
and for the rest of one that others did not live to take.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from manyhands.training.compute.one_thread import one_thread
from manyhands.training.memory.memory import Memory
from manyhands.training.state.followers import Follower
from manyhands.training.state.layout import Bounds, Lanes, Span, Unit, units
from manyhands.training.state.sharded_optimizer import ShardedOptimizer
from manyhands.training.sync.allreduce.partial_sums import Finisher, Parts
from manyhands.training.sync.allreduce.step_facts import StepTally
from manyhands.training.sync.clip import block_norms, coefficient, torch_coefficient
from manyhands.training.sync.finite import reach
from manyhands.training.sync.sync import Moment
from manyhands.values.errors import GradientNotFinite

Blocks = Sequence[tuple[Span, int, int]]
"""As `layout.blocks` gives them."""


class Update:
    def __init__(
        self,
        optimizer: ShardedOptimizer,
        memory: Memory,
        *,
        micro_batches: int,
        moment: Moment,
        followers: Callable[[Unit, int], Sequence[Follower]],
        updated: Callable[[Unit, int], None],
        begins: Callable[[Unit, int], None] = lambda unit, step: None,
        has_tables: bool = False,
    ) -> None:
        """`micro_batches`: of a full step. `begins`: told of each unit before it takes a step;
        `updated`: after it, unless all that it does was done within the step, by `followers` of the
        unit. `has_tables`: norms are not those of dense gradients alone."""
        self.begins, self.has_tables = begins, has_tables
        self.optimizer, self.layout = optimizer, optimizer.layout
        self.micro_batches, self.moment = micro_batches, moment
        self.followers, self.updated = followers, updated
        self.finisher = Finisher()
        self.sums: Lanes = {
            dtype: memory.tensor(size, dtype=dtype)
            if optimizer.weights[dtype].device.type == "cpu"
            else torch.zeros(size, dtype=dtype, device=optimizer.weights[dtype].device)
            for dtype, size in self.layout.trainable_sizes.items()
        }
        """Finished gradients, where they are needed before or beyond the update of a unit."""
        self.whole: Bounds = {d: (0, size) for d, size in self.layout.trainable_sizes.items()}

    def finish_into_sums(
        self, step: StepTally, parts: Parts, origin: Bounds, spans: Sequence[Span]
    ) -> None:
        """The gradient of these spans. `parts` begin at `origin`."""
        for unit in units(self.layout, spans, cut=self.optimizer.cut):
            total = self.finisher.finish(step, parts, origin, unit.bounds)
            for dtype, (a, b) in unit.bounds.items():
                self.sums[dtype][a:b].copy_(total[dtype])

    def norms(self, step: StepTally, blocks: Blocks) -> NDArray[np.float64]:
        """Of what is in `sums`."""
        return _norms(step, [self.sums[span.piece.dtype][a:b] for span, a, b in blocks])

    def summed_norms(self, step: StepTally, blocks: Blocks) -> NDArray[np.float64]:
        """Of what hosts have summed up in `sums`: it has not been divided yet."""
        lanes = [self.sums[span.piece.dtype][a:b] for span, a, b in blocks]
        divisor = step.divisor
        return _norms(step, lanes if divisor is None else [lane / divisor for lane in lanes])

    def clip_factor(self, step: StepTally, norms: Callable[[], NDArray[np.float64]]) -> float:
        """What the gradient is multiplied with; `norms()` gives those of all blocks, in order.
        Raises when they show that it is not finite, before anything was changed."""
        whole = norms() if step.may_overflow else None
        if whole is not None and np.isnan(whole).any():
            raise GradientNotFinite(None, step.step)
        if step.clip_norm is None:
            return 1.0
        if self.micro_batches > 1 or self.has_tables:
            return coefficient(norms() if whole is None else whole, step.clip_norm)
        # With a single micro-batch there is a single worker, and PyTorch's own norm.
        pairs = zip(self.layout.trainable, step.touched, strict=True)
        whole = [piece.view(self.sums[piece.dtype]) for piece, touched in pairs if touched]
        return torch_coefficient(whole, step.clip_norm)

    def update(self, step: StepTally, parts: Parts, origin: Bounds, factor: float) -> None:
        """Every unit that is worked on here, one after the other. `parts` begin at `origin`."""

        def gradient(unit: Bounds) -> Lanes:
            if step.clip_norm is not None or step.may_overflow:
                return self._summed(unit)
            return self.finisher.finish(step, parts, origin, unit)

        self._update(step, gradient, factor)

    def update_summed(self, step: StepTally, factor: float) -> None:
        """The same, when hosts have summed up the whole gradient in `sums`."""

        def gradient(unit: Bounds) -> Lanes:
            return self.finisher.divided(self._summed(unit), step.divisor)

        self._update(step, gradient, factor)

    def _summed(self, unit: Bounds) -> Lanes:
        return {dtype: self.sums[dtype][a:b] for dtype, (a, b) in unit.items()}

    def _update(self, step: StepTally, gradient: Callable[[Bounds], Lanes], factor: float) -> None:
        optimizer = self.optimizer
        with one_thread():
            for k, work in enumerate(optimizer.works):
                if k:
                    self.moment("update")
                unit = work.unit.bounds
                finished = gradient(unit)
                if factor < 1.0 or optimizer.cut == "nowhere":  # unknown ones may write to it
                    finished = self.finisher.scaled(finished, factor)
                self.begins(work.unit, step.step)
                followers = self.followers(work.unit, step.step)
                done = optimizer.update(
                    work, finished, unit, step.touched, step.step, followers=followers
                )
                if not (done and followers):
                    self.updated(work.unit, step.step)


def _norms(step: StepTally, blocks: Sequence[Tensor]) -> NDArray[np.float64]:
    """NaN where a block is not finite, when that could be: its norm can be infinite without it."""
    found = block_norms(blocks)
    if step.may_overflow:
        found[[not math.isfinite(reach([block])) for block in blocks]] = math.nan
    return found
