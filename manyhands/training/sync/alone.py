# SPDX-License-Identifier: Apache-2.0
"""One worker and nobody to agree with: plain PyTorch, written to be obviously right.

It is the reference that the other strategies are tested against. It keeps every micro-batch's
gradient until the step, so it uses M times the gradient's memory.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from manyhands.accounting.deal_micro_batches import Cut, MicroBatch, Node
from manyhands.accounting.read_digests import joined_digest
from manyhands.training.compute.micro_batch_gradient import Leaf, LossFn
from manyhands.training.compute.one_thread import one_thread
from manyhands.training.compute.seeds import seed_everything
from manyhands.training.memory.memory import Memory
from manyhands.training.state.layout import BLOCK, share_out, units
from manyhands.training.state.lent_weights import lendable, writable
from manyhands.training.state.max_norm_rows import shorten
from manyhands.training.state.module_buffers import StatisticsRow
from manyhands.training.state.optimizer_kinds import NOTHING_KEPT, how_to_cut
from manyhands.training.state.phased_optimizer import acting
from manyhands.training.state.replica import Replica, StepFacts
from manyhands.training.state.rows.sum_rows import GradientRows
from manyhands.training.state.sharded_optimizer import ShardedOptimizer
from manyhands.training.state.undo_log import UndoLog
from manyhands.training.sync.after_step import call_after_step, make_ready
from manyhands.training.sync.canonical_sum import finish
from manyhands.training.sync.clip import block_norms, coefficient, torch_coefficient
from manyhands.training.sync.finite import reach
from manyhands.training.sync.leaf_gradients import LeafGradients
from manyhands.training.sync.sync import CHANGING_NAMES, MIXED_WEIGHTS, Held, Place
from manyhands.training.sync.table_sums import bucket_norms, finished, scaled
from manyhands.values.config import TrainConfig
from manyhands.values.errors import GradientNotFinite, LossNotFinite, TaskError


class Alone:
    def __init__(
        self,
        replica: Replica,
        train: TrainConfig,
        leaves: LeafGradients,
        *,
        heard: Callable[[], int] = lambda: 0,
        after_step: Callable[[Module], Any] | None = None,
    ) -> None:
        self.after_step = after_step
        self.replica, self.heard, self.micro_batches = replica, heard, train.micro_batches
        self.seed, self.leaves = train.seed, leaves
        self.skips = train.not_finite == "skip"
        replica.clip_norm = train.clip_norm
        how_to_cut(replica.optimizer)  # refuses what cannot be done
        undo_log = UndoLog(replica.layout, replica.weights, {}, {}, {}, Memory(None), extras=True)
        self.optimizer = ShardedOptimizer(
            replica.optimizer,
            replica.parameters,
            replica.layout,
            replica.weights,
            undo_log,
            "nowhere",
            NOTHING_KEPT,
            replica.buffers,
            seed=train.seed,
        )
        self._gradients: list[dict[str, Tensor]] = []
        self._table_rows: list[list[GradientRows]] = []
        self._leaves: list[Leaf] = []
        self._rows: list[StatisticsRow] = []
        self._outcomes: list[dict[str, Tensor]] = []
        self._shares: list[float] = []
        self._read: list[int] = []
        self._holds = self._skipped = False

    def regroup(self, place: Place) -> None:
        self._holds = True
        if place.fresh is not None:  # else nobody died: it is the same worker, between two steps
            self._begin(place, place.fresh)
        self.replica.hear_journal()
        self.replica.change(place.changes)

    def _begin(self, place: Place, step: int) -> None:
        self.replica.publish()
        self.replica.adopt()
        self.replica.step = step
        (spans,) = share_out(self.replica.layout, 1, cut="nowhere")
        everything = units(self.replica.layout, spans, cut="nowhere")
        self.optimizer.regroup(0, everything, step)
        if place.entries is not None:
            self.optimizer.load(place.entries())
        saved = place.averages() if place.averages is not None else {}
        for name, average in self.replica.averages.items():
            average.reset(step, saved.get(name))
        self.replica.tables.reset(step, place.tables() if place.tables is not None else ())

    def held(self) -> Held:
        return Held(self._holds, self.optimizer.entries())

    def indices(self, cut: Cut) -> range:
        return range(len(cut.sizes))

    def backward(self, cut: Cut, micro_batches: Iterable[MicroBatch], loss: LossFn) -> StepFacts:
        replica = self.replica
        replica.turn_to(cut.step)
        for cleared in (self._gradients, self._leaves, self._rows, self._outcomes, self._shares):
            cleared.clear()
        self._read.clear()
        self._table_rows.clear()
        for micro_batch in self.leaves.begin(cut, micro_batches, loss, None):
            leaf = self.leaves.compute(cut, micro_batch, loss)
            if not math.isfinite(leaf.loss) and not self.skips:
                raise LossNotFinite(0, cut.step, micro_batch.index, leaf.loss, ())
            row = np.zeros(replica.buffers.row_width)
            replica.buffers.end(row)
            self._rows.append(row)
            self._outcomes.append(replica.buffers.outcome())
            self._leaves.append(leaf)
            self._shares.append(micro_batch.share)
            self._read.append(micro_batch.read)
            self._gradients.append(self._take_gradients())
            self._table_rows.append(replica.tables.take_gradients())
        replica.tables.see_room(cut.step)
        return self._facts(cut)

    def _take_gradients(self) -> dict[str, Tensor]:
        taken: dict[str, Tensor] = {}
        for name, parameter in self.replica.parameters.items():
            if parameter.grad is not None:
                grad = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
                same = grad.stride() == parameter.stride()
                taken[name] = grad if same else torch.empty_like(parameter).copy_(grad).detach()
                parameter.grad = None
        return taken

    def _facts(self, cut: Cut) -> StepFacts:
        scales = self._scales()
        total = sum(scales)
        if len({leaf.weight is None for leaf in self._leaves}) > 1:
            raise TaskError(MIXED_WEIGHTS)
        if len({tuple(sorted(leaf.numbers)) for leaf in self._leaves}) > 1:
            raise TaskError(CHANGING_NAMES)
        if total == 0:
            raise TaskError(f"all weights that the loss returned in step {cut.step} are 0.")
        names = sorted({name for leaf in self._leaves for name in leaf.numbers})
        pairs = list(zip(self._leaves, scales, strict=True))
        numbers = {n: sum(x.numbers.get(n, 0.0) * w for x, w in pairs) / total for n in names}
        loss = sum(leaf.loss * w for leaf, w in pairs) / total
        gradients = [g for of_leaf in self._gradients for g in of_leaf.values()]
        gradients += [g.rows for of_leaf in self._table_rows for g in of_leaf]
        skipped = not math.isfinite(loss) or not math.isfinite(reach(gradients))
        error = GradientNotFinite(0, cut.step)
        if skipped and not self.skips and not self.replica.loss_scale.excuses(error):
            raise error
        self._skipped = skipped
        why = "a loss or a gradient is not finite" if skipped else ""
        read = joined_digest(self._read)
        return StepFacts(cut.step, loss, sum(cut.sizes), self.heard(), numbers, why, read)

    def _scales(self) -> list[float]:
        weights = [leaf.weight for leaf in self._leaves]
        return [s if w is None else w for w, s in zip(weights, self._shares, strict=True)]

    def step(self) -> None:
        if self._skipped:
            self.replica.loss_scale.after(skipped=True)
            self.replica.tables.pass_over(self.replica.step)
        else:
            self._take_step()
        for average in self.replica.averages.values():
            average.plan(self.replica.step, skipped=self._skipped)
            average.finish(self.replica.step + 1, rank=0)

    def _take_step(self) -> None:
        replica = self.replica
        leaves = len(self._leaves)
        weighted = self._leaves[0].weight is not None
        divisor = (sum(self._scales()) if weighted else 1.0) * replica.loss_scale.value
        for name, parameter in replica.parameters.items():
            found = [g.get(name) for g in self._gradients]
            some = next((g for g in found if g is not None), None)
            if some is None:
                continue
            filled = [g if g is not None else some.new_zeros(some.shape) for g in found]
            parts = [(Node(i, 0), gradient) for i, gradient in enumerate(filled)]
            parameter.grad = finish(parts, leaves, lambda a, b: a + b)
            if divisor != 1.0:
                parameter.grad /= divisor
        tables = [
            finished([(Node(i, 0), g) for i, g in enumerate(of_table)], leaves, divisor)
            for of_table in zip(*self._table_rows, strict=True)
        ]
        sums = [p.grad for p in replica.parameters.values() if p.grad is not None]
        if not math.isfinite(reach([*sums, *(g.rows for g in tables)])):
            raise GradientNotFinite(None, replica.step)
        factor = self._clip(tables)
        tables = [scaled(gradient, factor) for gradient in tables]
        self._commit_buffers()
        replica.loss_scale.after(skipped=False)
        trainable = replica.layout.trainable
        factors = replica.buffers.row_factors()
        for piece in trainable:
            if piece.name in factors:
                weight = replica.weight(piece)
                shorten(weight.view(-1), 0, piece.shape[1], factors[piece.name])
        replica.buffers.show()
        rate = replica.tables.rate(replica.optimizer)
        weights = lendable(replica.layout.pieces, replica.parameters, replica.weights)
        with one_thread(), writable(weights):
            seed_everything(self.seed, replica.step, "optimizer")
            acting(replica.optimizer, replica.step).step()
        replica.tables.apply(tables, replica.step, rate)
        replica.optimizer.zero_grad()
        replica.buffers.commit_alone()  # hooks of the optimizer may have changed them
        if self.after_step is not None:
            make_ready(replica, self.seed, replica.step)
            call_after_step(self.after_step, replica, weights)

    def _clip(self, tables: list[GradientRows]) -> float:
        """What all gradients were multiplied with; those of tables are still to be."""
        clip_norm = self.replica.clip_norm
        if clip_norm is None:
            return 1.0
        order = (self.replica.parameters[p.name].grad for p in self.replica.layout.trainable)
        gradients = [g for g in order if g is not None]
        if self.micro_batches == 1 and not tables:
            factor = torch_coefficient(gradients, clip_norm)
        else:
            pieces = [b for g in gradients for b in _in_memory_order(g).split(BLOCK)]
            norms = np.concatenate([block_norms(pieces), bucket_norms(tables)])
            factor = coefficient(norms, clip_norm)
        for gradient in gradients:
            gradient.mul_(factor)
        return factor

    def _commit_buffers(self) -> None:
        buffers, rows = self.replica.buffers, np.stack(self._rows)
        if len(rows) == 1:
            buffers.commit_alone()
            return
        buffers.commit_norms(rows)
        if changed := {piece.name for piece in buffers.changed(rows)}:
            outcomes = [{k: v for k, v in o.items() if k in changed} for o in self._outcomes]
            buffers.commit_others(self.replica.step, outcomes, self._shares)

    def close(self) -> None: ...


def _in_memory_order(gradient: Tensor) -> Tensor:
    """All elements as one vector, in the order in which they lie in memory."""
    order = sorted(range(gradient.dim()), key=gradient.stride, reverse=True)
    return gradient.permute(order).reshape(-1)
