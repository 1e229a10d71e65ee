# SPDX-License-Identifier: Apache-2.0
"""Every worker computes some micro-batches; all agree on the canonical sum of their gradients.

Promise: when `step` returns, every worker of the view sees the same weights, bit for bit those
that one worker would have computed alone.

A step, on worker r with its range of micro-batches:

    compute       each leaf's gradient is added into r's slots as far as the tree allows
    gather        losses, touched parameters, buffer statistics; everyone's slots are now complete
    exchange      r gets its stretch of everybody's subtree sums and finishes the tree for it
    (clip)        norms of fixed blocks are gathered, in fixed order
    update        r's part of the optimizer updates r's stretch of the weights
    share         everyone has the new weights
"""

import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from manyhands.config import TrainConfig
from manyhands.deal import Cut, MicroBatch, Node, deal, subtrees
from manyhands.errors import LossNotFinite, TaskError
from manyhands.train.buffers import pack, packed_size, unpack
from manyhands.train.clip import block_norms, coefficient, torch_coefficient
from manyhands.train.collective.contract import Bounds, Collective, Lanes, Sizes
from manyhands.train.layout import blocks, bounds, share_out
from manyhands.train.leaf import MOST_NUMBERS, Leaf, LossFn, compute
from manyhands.train.memory import Memory
from manyhands.train.optim import SharedOut, how_to_cut, one_thread
from manyhands.train.state import Replica
from manyhands.train.sync.canonical import TreeSum, finish, most_parts
from manyhands.train.sync.contract import CHANGING_NAMES, MIXED_WEIGHTS, StepFacts
from manyhands.world import World

HEADER = 1  # [last command heard]
FACTS = 5  # per micro-batch: [loss, weight or NaN, share, records, mark of the numbers' names]
_FOREACH_ADD: Any = getattr(torch, "_foreach_add_")  # noqa: B009 (private, and no other way)
_FOREACH_COPY: Any = getattr(torch, "_foreach_copy_")  # noqa: B009


@dataclass(slots=True)
class _Step:
    """What `backward` leaves for `step`."""

    cut: Cut
    rows: NDArray[np.float64]
    outcomes: list[dict[str, Tensor]]
    touched: Sequence[bool]
    scales: NDArray[np.float64]
    weighted: bool


class AllReduce:
    def __init__(
        self,
        replica: Replica,
        world: World,
        memory: Memory,
        collective: Callable[[Sizes], Collective],
        train: TrainConfig,
        *,
        speeds: tuple[float, ...],
        heard: Callable[[], int],
    ) -> None:
        """`heard` gives the number of the last command that has reached this worker."""
        self.replica, self.world, self.speeds, self.heard = replica, world, speeds, heard
        self.micro_batches = train.micro_batches
        self.seed, self.precision = train.seed, train.precision
        self.clip_norm = train.clip_norm
        layout = replica.layout
        cut, _ = how_to_cut(replica.optimizer)
        self.spans = share_out(layout, world.num_ranks, cut=cut)
        self.bounds = [bounds(spans) for spans in self.spans]
        self.width = FACTS + MOST_NUMBERS + len(layout.trainable) + replica.buffers.row_width
        most_leaves = train.micro_batches + 1  # a last record joins the batch before it
        self.blocks = [blocks(spans) for spans in self.spans]
        self.most_blocks = max(len(b) for b in self.blocks)
        self.collective = collective(
            Sizes(
                lanes=layout.trainable_sizes,
                slots=most_parts(most_leaves),
                message_bytes=max(
                    8 * (HEADER + most_leaves * self.width),
                    8 * self.most_blocks,
                    most_leaves * packed_size(replica.buffers.others),
                    packed_size(replica.buffers.layout.pieces),
                ),
            )
        )
        self.optimizer = SharedOut(
            replica.optimizer,
            replica.parameters,
            layout,
            replica.weights,
            self.spans[world.rank],
            cut,
            memory,
        )
        self._shared_weights = memory.shared
        self._views: dict[int, list[Tensor]] = {}
        self._trainable = [replica.parameters[p.name] for p in layout.trainable]
        self._names: list[str] = []
        self._step: _Step | None = None

    def setup(self) -> None:
        # In shared memory there is one copy, and the leader's model is what all start from.
        if self.world.leads or not self._shared_weights:
            self.replica.publish()
        everything = {dtype: (0, len(lane)) for dtype, lane in self.replica.weights.items()}
        nothing: Bounds = dict.fromkeys(everything, (0, 0))
        from_leader = [everything] + [nothing] * (self.world.num_ranks - 1)
        self.collective.share(self.replica.weights, from_leader)
        self.replica.adopt()

    def indices(self, cut: Cut) -> range:
        return deal(len(cut.sizes), self.speeds)[self.world.rank]

    def backward(self, cut: Cut, micro_batches: Iterable[MicroBatch], loss: LossFn) -> StepFacts:
        mine = self.indices(cut)
        most = max(len(r) for r in deal(len(cut.sizes), self.speeds))
        message = np.zeros(HEADER + most * self.width)
        message[0] = self.heard()
        rows = message[HEADER:].reshape(most, self.width)
        outcomes: list[dict[str, Tensor]] = []
        tree: TreeSum[int] = TreeSum(len(cut.sizes), self._add_slots)
        for row, micro_batch in zip(rows[: len(mine)], micro_batches, strict=True):
            self.replica.buffers.begin(alone=len(cut.sizes) == 1)
            leaf = compute(
                self.replica.model, micro_batch, loss, seed=self.seed, precision=self.precision
            )
            self._write_row(row, micro_batch, leaf)
            self.replica.buffers.end(row[self.width - self.replica.buffers.row_width :])
            if self.replica.buffers.others:
                outcomes.append(self.replica.buffers.outcome())
            self._collect(tree, micro_batch.index)
        everyone = [m.view(np.float64) for m in self.collective.gather(message.view(np.uint8))]
        return self._learn(cut, everyone, outcomes)

    def _write_row(self, row: NDArray[np.float64], micro_batch: MicroBatch, leaf: Leaf) -> None:
        weight = math.nan if leaf.weight is None else leaf.weight
        names = sorted(leaf.numbers)
        mark = zlib.crc32("\n".join(names).encode())
        row[:FACTS] = leaf.loss, weight, micro_batch.share, micro_batch.records, mark
        if leaf.numbers:
            self._names = names
            row[FACTS : FACTS + len(self._names)] = [leaf.numbers[n] for n in self._names]
        at = FACTS + MOST_NUMBERS
        for k, parameter in enumerate(self._trainable):
            row[at + k] = parameter.grad is not None

    def _collect(self, tree: TreeSum[int], index: int) -> None:
        """Move the gradients in `.grad` into a slot, or add them to the left sibling's."""
        adding = tree.completes_pair(index)
        slot = tree.parts[-1][1] if adding else len(tree.parts)
        views, gradients = [], []
        for view, parameter in zip(self._slot_views(slot), self._trainable, strict=True):
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:
                # Adding 0.0 and not nothing: the other worker's zeros would be added too.
                view.add_(0.0) if adding else view.zero_()
                continue
            views.append(view)
            gradients.append(gradient.to_dense() if gradient.is_sparse else gradient)
        if adding:
            _FOREACH_ADD(views, gradients)
            tree.absorb()
        else:
            _FOREACH_COPY(views, gradients)
            tree.push(Node(index, 0), slot)

    def _slot_views(self, slot: int) -> list[Tensor]:
        if slot not in self._views:
            lanes = self.collective.slots[slot]
            trainable = self.replica.layout.trainable
            self._views[slot] = [piece.view(lanes[piece.dtype]) for piece in trainable]
        return self._views[slot]

    def _add_slots(self, left: int, right: int) -> int:
        slots = self.collective.slots
        _add_lanes(slots[left], slots[right])
        return left

    def _learn(
        self, cut: Cut, everyone: list[NDArray[np.float64]], outcomes: list[dict[str, Tensor]]
    ) -> StepFacts:
        """Facts of the step from all workers' rows, put in index order; equal on every worker."""
        ranges = deal(len(cut.sizes), self.speeds)
        rows = np.concatenate(
            [
                m[HEADER:].reshape(-1, self.width)[: len(r)]
                for m, r in zip(everyone, ranges, strict=True)
            ]
        )
        losses, weights, shares = rows[:, 0], rows[:, 1], rows[:, 2]
        for index in np.flatnonzero(~np.isfinite(losses)):
            owner = next(rank for rank, r in enumerate(ranges) if index in r)
            raise LossNotFinite(owner, cut.step, int(index), float(losses[index]), ())
        weighted = not np.isnan(weights).all()
        if weighted and np.isnan(weights).any():
            raise TaskError(MIXED_WEIGHTS)
        if len(set(rows[:, 4].tolist())) > 1:
            raise TaskError(CHANGING_NAMES)
        scales = weights if weighted else shares
        at = FACTS + MOST_NUMBERS
        flags = rows[:, at : at + len(self._trainable)]
        touched = [bool(flags[:, k].any()) for k in range(len(self._trainable))]
        self._step = _Step(cut, rows, outcomes, touched, scales.copy(), weighted)
        total = _in_order(scales)
        if total == 0:
            raise TaskError(f"all weights that the loss returned in step {cut.step} are 0.")
        values = rows[:, FACTS : FACTS + len(self._names)]
        numbers = {n: _in_order(values[:, k] * scales) / total for k, n in enumerate(self._names)}
        return StepFacts(
            loss=_in_order(losses * scales) / total,
            records=sum(cut.sizes),
            agreed=int(min(m[0] for m in everyone)),
            numbers=numbers,
        )

    def step(self) -> None:
        assert self._step is not None, "backward comes first"
        step, self._step = self._step, None
        with torch.no_grad():
            gradient = self._exchange(step)
            self._scale(gradient, step)
            with one_thread():
                self.optimizer.step(gradient, self.bounds[self.world.rank], step.touched)
            self.optimizer.release_gradients()
            self._commit_buffers(step)
            self.collective.share(self.replica.weights, self.bounds)

    def _exchange(self, step: _Step) -> Lanes:
        """This worker's stretch of the finished sum."""
        leaves = len(step.cut.sizes)
        nodes = [subtrees(r, leaves) for r in deal(leaves, self.speeds)]
        received = self.collective.exchange([len(n) for n in nodes], self.bounds)
        parts = [
            (node, lanes)
            for owned, slots in zip(nodes, received, strict=True)
            for node, lanes in zip(owned, slots, strict=True)
        ]
        return finish(parts, leaves, _add_lanes)

    def _scale(self, gradient: Lanes, step: _Step) -> None:
        if step.weighted:
            total = _in_order(step.scales)
            for lane in gradient.values():
                lane.div_(total)
        if self.clip_norm is None:
            return
        mine = self.bounds[self.world.rank]
        pieces = [
            gradient[span.piece.dtype][start - mine[span.piece.dtype][0] :][: stop - start]
            for span, start, stop in self.blocks[self.world.rank]
        ]
        if self.micro_batches == 1:
            whole = self._touched_gradients(gradient, step)
            factor = torch_coefficient(whole, self.clip_norm)
        else:
            norms = np.zeros(self.most_blocks)
            norms[: len(pieces)] = block_norms(pieces)
            everyone = self.collective.gather(norms.view(np.uint8))
            counts = [len(b) for b in self.blocks]
            rows = [m.view(np.float64)[:n] for m, n in zip(everyone, counts, strict=True)]
            factor = coefficient(np.concatenate(rows), self.clip_norm)
        if factor < 1.0:
            for lane in gradient.values():
                lane.mul_(factor)

    def _touched_gradients(self, gradient: Lanes, step: _Step) -> list[Tensor]:
        """With a single worker: whole tensors."""
        return [
            span.piece.view(gradient[span.piece.dtype])
            for span in self.spans[0]
            if step.touched[span.index]
        ]

    def _commit_buffers(self, step: _Step) -> None:
        """Every worker keeps its own copy of the buffers and merges all outcomes itself."""
        buffers = self.replica.buffers
        if not buffers.layout.pieces:
            return
        rows = step.rows[:, self.width - buffers.row_width :]
        leaves = len(step.cut.sizes)
        if leaves == 1 and self.world.num_ranks == 1:
            buffers.commit_alone()
            return
        if leaves > 1:
            buffers.commit_norms(rows)
        changed = buffers.changed(rows)
        if leaves == 1:
            changed = list(buffers.layout.pieces)  # taken as they are, statistics included
        if not changed:
            return
        ranges = deal(leaves, self.speeds)
        size, most = packed_size(changed), max(len(r) for r in ranges)
        message = np.zeros(most * size, dtype=np.uint8)
        mine = pack(step.outcomes, changed) if leaves > 1 else self._single_outcome(ranges)
        message[: len(mine)] = mine
        outcomes = [
            unpack(received[k * size : (k + 1) * size], changed)
            for received, r in zip(self.collective.gather(message), ranges, strict=True)
            for k in range(len(r))
        ]
        if leaves == 1:
            buffers.load(outcomes[0])
        else:
            buffers.commit_others(step.cut.step, outcomes, list(step.rows[:, 2]))

    def _single_outcome(self, ranges: Sequence[range]) -> NDArray[np.uint8]:
        """All buffers after the step's only micro-batch, if it was computed here."""
        if not ranges[self.world.rank]:
            return np.empty(0, dtype=np.uint8)
        return pack([self.replica.buffers.values()], self.replica.buffers.layout.pieces)

    def close(self) -> None:
        self.collective.close()


def _add_lanes(left: Lanes, right: Lanes) -> Lanes:
    for dtype, lane in left.items():
        lane.add_(right[dtype])
    return left


def _in_order(values: NDArray[np.float64]) -> float:
    """Summed from left to right (numpy's own sum is pairwise and depends on its version)."""
    return float(sum(values.tolist()))
