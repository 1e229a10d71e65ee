# SPDX-License-Identifier: Apache-2.0
"""Every worker computes some micro-batches; all agree on the canonical sum of their gradients.

Promise: when `step` returns, every worker of the view sees the same weights, bit for bit those
that one worker would have computed alone.

A step, on worker r with its range of micro-batches:

    compute       each leaf's gradient is added into r's slots as far as the tree allows
    gather        losses, touched parameters, buffer statistics; everyone's slots are now complete
    (clip)        r finishes the tree for its stretch; norms of fixed blocks are gathered
    update        unit by unit: finish the tree, then r's part of the optimizer, under an undo log
    share         a meeting: everyone has the new weights

Where every worker has memory of its own, `share` sends the finished gradient instead, and every
worker updates all of the weights: the whole state is then with each of them.

**When workers die** (shared memory). Until the gather is complete nothing has been changed, and the
step is computed again. After it, everything the step needs is in memory that outlives its workers:
facts, partial sums, undo logs. So `regroup` lets the leader `mend`: units that were being updated
are put back, units that are behind are brought forward, and the step counts as taken by the view
that computed its gradients. Nothing is computed twice.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from manyhands.config import TrainConfig
from manyhands.deal import Cut, MicroBatch, Node, deal, subtrees
from manyhands.train.buffers import pack, packed_size, unpack
from manyhands.train.clip import block_norms, coefficient, torch_coefficient
from manyhands.train.collective.contract import (
    FACTS,
    NORMS,
    OUTCOMES,
    Bounds,
    Bytes,
    Collective,
    Lanes,
    Sizes,
)
from manyhands.train.keep import Keep
from manyhands.train.layout import Unit, blocks, bounds, share_out, units
from manyhands.train.leaf import LossFn, compute, digest
from manyhands.train.memory import Memory
from manyhands.train.optim import (
    NOTHING_KEPT,
    SharedOut,
    groups_to_json,
    how_to_cut,
    one_thread,
    restore,
    schedule_to_json,
    what_it_keeps,
)
from manyhands.train.state import Replica
from manyhands.train.sync.canonical import TreeSum, most_parts
from manyhands.train.sync.contract import Auditor, Moment, Place, StepFacts
from manyhands.train.sync.facts import Form, Tally
from manyhands.train.sync.finishing import Finisher, Parts, parts_of
from manyhands.world import World

_FOREACH_ADD: Any = getattr(torch, "_foreach_add_")  # noqa: B009 (private, and no other way)
_FOREACH_COPY: Any = getattr(torch, "_foreach_copy_")  # noqa: B009

Meet = Callable[[World, int], Collective]
"""A collective for the members of a view, given this worker's place and the generation."""


class AllReduce:
    def __init__(
        self,
        replica: Replica,
        memory: Memory,
        collective: Callable[[Sizes], Meet],
        train: TrainConfig,
        *,
        heard: Callable[[], int],
        moment: Moment,
        auditor: Auditor,
    ) -> None:
        """`heard` gives the number of the last command that has reached this worker."""
        self.replica, self.heard, self.moment = replica, heard, moment
        self.auditor = auditor
        self.micro_batches = train.micro_batches
        self.seed, self.precision = train.seed, train.precision
        self.clip_norm = train.clip_norm
        self.facts: StepFacts | None = None
        layout = replica.layout
        self.cut, _ = how_to_cut(replica.optimizer)
        kept = what_it_keeps(replica.optimizer, layout) if self.cut == "blocks" else NOTHING_KEPT
        self.shared = memory.shared
        self.keep = Keep(
            layout,
            replica.weights,
            kept.slots,
            kept.scalars,
            replica.buffers.layout.sizes,
            memory,
            extras=self.cut != "blocks",
        )
        self.optimizer = SharedOut(
            replica.optimizer,
            replica.parameters,
            layout,
            replica.weights,
            self.keep,
            self.cut,
            kept,
        )
        self.sums: Lanes = {
            dtype: memory.tensor(size, dtype=dtype)
            if replica.weights[dtype].device.type == "cpu"
            else torch.zeros(size, dtype=dtype, device=replica.weights[dtype].device)
            for dtype, size in layout.trainable_sizes.items()
        }
        """Finished gradients, where they are needed before or beyond the update of a unit."""
        self.form = Form(len(layout.trainable), replica.buffers.row_width)
        most_leaves = train.micro_batches + 1  # a last record joins the batch before it
        self._meet = collective(
            Sizes(
                lanes=layout.trainable_sizes,
                slots=most_parts(most_leaves),
                message_bytes=max(
                    self.form.size_bytes(most_leaves),
                    8 * layout.first_blocks[-1],
                    most_leaves * packed_size(replica.buffers.others),
                    packed_size(replica.buffers.layout.pieces),
                ),
            )
        )
        self.collective: Collective  # made by regroup, anew for every view
        self._views: dict[int, list[Tensor]] = {}
        self._trainable = [replica.parameters[p.name] for p in layout.trainable]
        self._step: Tally | None = None
        self._outcomes: list[dict[str, Tensor]] = []
        self.finisher = Finisher()
        self._current = False
        """Whether groups and schedule here are those of `replica.step`."""

    # ---- a place in a view

    def regroup(self, place: Place) -> None:
        self.world, self.speeds, self.generation = place.world, place.speeds, place.generation
        self.collective = self._meet(place.world, place.generation)
        self._views.clear()
        self._step = None
        self.spans = share_out(self.replica.layout, self.world.num_ranks, cut=self.cut)
        self.bounds = [bounds(spans) for spans in self.spans]
        self.blocks = [blocks(spans) for spans in self.spans]
        self.most_blocks = max(len(b) for b in self.blocks)
        if place.fresh is not None:
            self._begin(place, place.fresh)
        elif self.shared:
            if self.world.leads:
                self._mend()
            self._wait_for_all()
            self._go_on()
        else:
            self._copy_from_newest()
        self.note()

    def note(self) -> None:
        """Groups and schedule as they are now, between steps: whoever joins later must know."""
        if self.world.leads and self.shared:
            self.keep.put_note(self.generation, self.replica.step, self._note())

    def _wait_for_all(self) -> None:
        nothing: Bounds = dict.fromkeys(self.replica.weights, (0, 0))
        self.collective.share(self.replica.weights, [nothing] * self.world.num_ranks)

    def _my_units(self) -> list[Unit]:
        """In shared memory a worker updates its stretch, elsewhere everything."""
        layout, rank = self.replica.layout, self.world.rank
        spans = self.spans[rank] if self.shared else share_out(layout, 1, cut=self.cut)[0]
        return units(layout, spans, cut=self.cut)

    def _begin(self, place: Place, step: int) -> None:
        """With what the replicas hold; the leader's model is what all start from."""
        replica = self.replica
        if self.world.leads or not self.shared:
            replica.publish()
            self.keep.reset(step)
            self.keep.put_buffers(step, replica.buffers.committed)
        everything = {dtype: (0, len(lane)) for dtype, lane in replica.weights.items()}
        nothing: Bounds = dict.fromkeys(everything, (0, 0))
        from_leader = [everything] + [nothing] * (self.world.num_ranks - 1)
        self.collective.share(replica.weights, from_leader)
        replica.adopt()
        replica.step, self._current = step, True
        self.optimizer.regroup(self.world.rank, self._my_units(), step, fresh=True)
        if place.entries is not None:
            self.optimizer.load(place.entries())
            self.optimizer.keep_extras(step)
        self._wait_for_all()

    def _go_on(self) -> None:
        """With what is kept."""
        step, _ = self.keep.steps()
        self.replica.adopt()
        self._catch_up(step)
        self.keep.get_buffers(step, self.replica.buffers.committed)
        self.replica.buffers.show()
        self.optimizer.regroup(self.world.rank, self._my_units(), step)

    def _catch_up(self, step: int) -> None:
        """Groups and schedule as they are after `step` steps."""
        replica = self.replica
        if not self._current:
            found = self.keep.get_note()
            assert found is not None, "a view that goes on follows one that began"
            replica.step, note = found
            self._take_note(note)
            # The note may be older than a change that was made at its very step.
            replica.change(replica.changes.get(replica.step, {}))
        while replica.step < step:
            replica.advance()

    def _note(self) -> bytes:
        replica = self.replica
        groups, schedule = groups_to_json(replica.optimizer), schedule_to_json(replica.schedule)
        return json.dumps([replica.step, groups, schedule]).encode()

    def _take_note(self, note: bytes) -> None:
        replica = self.replica
        replica.step, groups, saved = json.loads(note)
        restore(replica.optimizer, replica.schedule, groups=groups, saved=saved, step=replica.step)
        self._current = True

    # ---- after a death: memory of the host

    def _mend(self) -> None:
        """Bring everything that is kept to the end of the newest step that anybody began to take.

        Idempotent: whoever mends can die too.
        """
        self.keep.repair()
        low, high = self.keep.steps()
        if low < high:
            self._catch_up(low)
            self._finish_step(low)
        buffers = self.replica.buffers
        if not self.keep.get_buffers(high, buffers.committed):
            whole = self.keep.get_buffers(high - 1, buffers.committed)
            assert whole, f"buffers of step {high - 1} are kept until those of {high} are"
            self._commit_buffers(self._recall(high - 1), self._recall_outcomes(high - 1))
            self.keep.put_buffers(high, buffers.committed)

    def _recall(self, step: int) -> Tally:
        return self.form.read(step, self.collective.recall(FACTS, step))

    def _recall_outcomes(self, step: int) -> list[Bytes]:
        return self.collective.recall(OUTCOMES, step)

    def _finish_step(self, step: int) -> None:
        """Update what the members of the view before this one did not get to."""
        facts, layout = self._recall(step), self.replica.layout
        spans = share_out(layout, len(facts.ranges), cut=self.cut)
        behind = [
            unit
            for owned in spans
            for unit in units(layout, owned, cut=self.cut)
            if self.keep.done[unit.blocks[0]] == step
        ]
        parts = parts_of([self.collective.left_by(r) for r in range(len(facts.ranges))], facts)
        factor = self._factor_again(facts, [b for owned in spans for b in blocks(owned)])
        whole = {dtype: (0, size) for dtype, size in layout.trainable_sizes.items()}
        self.optimizer.regroup(self.world.rank, behind, step, own=True)
        with torch.no_grad():
            self._update(facts, parts, whole, factor)

    def _factor_again(self, facts: Tally, blocks: Sequence[Any]) -> float:
        """What the gradient of a step in progress is multiplied with; its sums are all there."""
        if facts.clip_norm is None:
            return 1.0
        if self.micro_batches == 1:
            return self._factor_of_tensors(facts)
        norms = block_norms([self.sums[s.piece.dtype][a:b] for s, a, b in blocks])
        return coefficient(norms, facts.clip_norm)

    # ---- after a death: every worker has its own memory

    def _copy_from_newest(self) -> None:
        """Those who are behind, or new, take everything from one who is not."""
        replica, rank = self.replica, self.world.rank
        mine = np.array([replica.step if self._current else -1], dtype=np.int64)
        steps = [int(m.view(np.int64)[0]) for m in self.collective.gather(mine.view(np.uint8))]
        holder = steps.index(max(steps))
        if min(steps) == max(steps):
            return
        behind = steps[rank] < max(steps)
        note, extras = self._note(), self.optimizer.pack()
        sizes = np.array([len(note), len(extras)], dtype=np.int64)
        everyone = self.collective.gather(sizes.view(np.uint8))
        lengths = [int(n) for n in everyone[holder].view(np.int64)]
        message = np.zeros(sum(lengths), dtype=np.uint8)
        if rank == holder:
            message[:] = np.frombuffer(note + extras, dtype=np.uint8)
        received = self.collective.gather(message)[holder].tobytes()
        lanes = [*replica.weights.values(), *replica.buffers.committed.values()]
        lanes += [*self.keep.slots.values(), *self.keep.scalars.values(), self.keep.exists]
        for lane in lanes:
            if lane.numel():
                owned: list[Bounds] = [{lane.dtype: (0, 0)}] * self.world.num_ranks
                owned[holder] = {lane.dtype: (0, len(lane))}
                self.collective.share({lane.dtype: lane}, owned)
        if behind:
            replica.adopt()
            self._take_note(received[: lengths[0]])
            replica.buffers.show()
            self.optimizer.regroup(rank, self._my_units(), replica.step)
            self.optimizer.unpack(received[lengths[0] :])

    # ---- a step

    def indices(self, cut: Cut) -> range:
        return deal(len(cut.sizes), self.speeds)[self.world.rank]

    def backward(self, cut: Cut, micro_batches: Iterable[MicroBatch], loss: LossFn) -> StepFacts:
        mine, audited = self.indices(cut), self.auditor.index(cut)
        most = max(len(r) for r in deal(len(cut.sizes), self.speeds))
        sheet = self.form.sheet(most)
        self._outcomes = []
        tree: TreeSum[int] = TreeSum(len(cut.sizes), self._add_slots)
        for row, micro_batch in zip(sheet.rows[: len(mine)], micro_batches, strict=True):
            self.replica.buffers.begin(alone=len(cut.sizes) == 1)
            leaf = compute(
                self.replica.model, micro_batch, loss, seed=self.seed, precision=self.precision
            )
            self.moment("leaf")
            if micro_batch.index == audited:
                sheet.digest = digest(self._trainable, leaf)
            sheet.fill(row, micro_batch, leaf, self._trainable)
            self.replica.buffers.end(self.form.of_buffers(row))
            if self.replica.buffers.others:
                self._outcomes.append(self.replica.buffers.outcome())
            self._collect(tree, micro_batch.index)
        if audited is not None and self._is_witness(cut, audited):
            sheet.digest = self.testify(cut, audited)
        self.moment("gather")
        message = sheet.signed(self.heard(), mine, self.clip_norm)
        # The first unit is copied aside while the others are waited for.
        prepare = partial(self.optimizer.prepare, cut.step)
        everyone = self.collective.gather(message, FACTS, cut.step, prepare)
        self._step = self.form.read(cut.step, everyone)
        self.facts = self.form.learn(cut, self._step, everyone, audited)
        return self.facts

    def _is_witness(self, cut: Cut, index: int) -> bool:
        """The worker after the one that this micro-batch is dealt to computes it too."""
        ranges = deal(len(cut.sizes), self.speeds)
        owner = next(rank for rank, r in enumerate(ranges) if index in r)
        return self.world.rank == (owner + 1) % self.world.num_ranks != owner

    def testify(self, cut: Cut, index: int) -> int:
        """A digest of what this worker computes for a micro-batch, whoever it is dealt to."""
        self.replica.buffers.begin(alone=len(cut.sizes) == 1)
        leaf = self.auditor.again(cut, index)
        self.moment("leaf")
        found = digest(self._trainable, leaf)
        for parameter in self._trainable:
            parameter.grad = None
        self.replica.buffers.show()  # what it did to them was not for the step
        return found

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
        for dtype, lane in slots[left].items():
            lane.add_(slots[right][dtype])
        return left

    def step(self) -> None:
        assert self._step is not None, "backward comes first"
        step, self._step = self._step, None
        with torch.no_grad():
            outcomes = self._gather_outcomes(step)
            if self.shared:
                self._step_shared(step, outcomes)
            else:
                self._step_private(step, outcomes)

    def _step_shared(self, step: Tally, outcomes: Sequence[Bytes]) -> None:
        self._commit_buffers(step, outcomes)
        self.moment("update")
        parts = parts_of(self._exchange(step), step)
        factor = self._clip_factor(step, parts) if step.clip_norm is not None else 1.0
        self._update(step, parts, self.bounds[self.world.rank], factor)
        if self.world.leads:
            self.keep.put_buffers(step.step + 1, self.replica.buffers.committed)
        self.moment("share")
        self.collective.share(self.replica.weights, self.bounds)

    def _step_private(self, step: Tally, outcomes: Sequence[Bytes]) -> None:
        """All get the finished gradient, and each updates everything: none is ever half-way."""
        mine = self.bounds[self.world.rank]
        parts = parts_of(self._exchange(step), step)
        if step.clip_norm is None:
            self._finish_into_sums(step, parts, mine)
        else:
            factor = self._clip_factor(step, parts)
            for dtype, (a, b) in mine.items():
                if factor < 1.0:
                    self.sums[dtype][a:b].mul_(factor)
        self.moment("share")
        self.collective.share(self.sums, self.bounds)
        self._commit_buffers(step, outcomes)
        self.moment("update")
        with one_thread():
            for work in self.optimizer.works:
                self.optimizer.update(work, self.sums, self._whole(), step.touched, step.step)

    def _whole(self) -> Bounds:
        return {dtype: (0, size) for dtype, size in self.replica.layout.trainable_sizes.items()}

    def _exchange(self, step: Tally) -> list[list[Lanes]]:
        """This worker's stretch of everybody's partial sums."""
        counts = [len(subtrees(r, step.leaves)) for r in step.ranges]
        return self.collective.exchange(counts, self.bounds)

    def _update(self, step: Tally, parts: Parts, origin: Bounds, factor: float) -> None:
        """Every unit that is worked on here, one after the other. `parts` begin at `origin`."""
        with one_thread():
            for k, work in enumerate(self.optimizer.works):
                if k:
                    self.moment("update")
                unit = work.unit.bounds
                if step.clip_norm is not None:
                    gradient = {d: self.sums[d][a:b] for d, (a, b) in unit.items()}
                else:
                    gradient = self.finisher.finish(step, parts, origin, unit)
                if factor < 1.0 or self.cut == "nowhere":  # an unknown optimizer may write to it
                    gradient = self.finisher.scaled(gradient, factor)
                self.optimizer.update(work, gradient, unit, step.touched, step.step)

    def _finish_into_sums(self, step: Tally, parts: Parts, mine: Bounds) -> None:
        for unit in units(self.replica.layout, self.spans[self.world.rank], cut=self.cut):
            total = self.finisher.finish(step, parts, mine, unit.bounds)
            for dtype, (a, b) in unit.bounds.items():
                self.sums[dtype][a:b].copy_(total[dtype])

    def _clip_factor(self, step: Tally, parts: Parts) -> float:
        """What the gradient is multiplied with. Its sums are left in `self.sums`."""
        assert step.clip_norm is not None
        self._finish_into_sums(step, parts, self.bounds[self.world.rank])
        if self.micro_batches == 1:
            return self._factor_of_tensors(step)
        mine = self.blocks[self.world.rank]
        norms = np.zeros(self.most_blocks)
        norms[: len(mine)] = block_norms([self.sums[s.piece.dtype][a:b] for s, a, b in mine])
        everyone = self.collective.gather(norms.view(np.uint8), NORMS, step.step)
        counts = [len(b) for b in self.blocks]
        rows = [m.view(np.float64)[:n] for m, n in zip(everyone, counts, strict=True)]
        return coefficient(np.concatenate(rows), step.clip_norm)

    def _factor_of_tensors(self, step: Tally) -> float:
        """With a single micro-batch there is a single worker, and PyTorch's own norm."""
        assert step.clip_norm is not None
        trainable = self.replica.layout.trainable
        whole = [
            p.view(self.sums[p.dtype]) for p, t in zip(trainable, step.touched, strict=True) if t
        ]
        return torch_coefficient(whole, step.clip_norm)

    # ---- buffers

    def _gather_outcomes(self, step: Tally) -> list[Bytes]:
        """Everyone's outcomes of the buffers that are merged by value, if any changed."""
        changed = self._changed(step)
        alone = step.leaves == 1 and self.world.num_ranks == 1
        if not changed or (alone and not self.shared):  # shared: whoever mends must find them
            return []
        size, most = packed_size(changed), max(len(r) for r in step.ranges)
        message = np.zeros(most * size, dtype=np.uint8)
        mine = self._single_outcome(step) if step.leaves == 1 else pack(self._outcomes, changed)
        message[: len(mine)] = mine
        return self.collective.gather(message, OUTCOMES, step.step)

    def _changed(self, step: Tally) -> list[Any]:
        buffers = self.replica.buffers
        if step.leaves == 1:
            return list(buffers.layout.pieces)  # taken as they are, statistics included
        return buffers.changed(self.form.of_buffers(step.rows))

    def _single_outcome(self, step: Tally) -> NDArray[np.uint8]:
        """All buffers after the step's only micro-batch, if it was computed here."""
        if not step.ranges[self.world.rank]:
            return np.empty(0, dtype=np.uint8)
        return pack([self.replica.buffers.values()], self.replica.buffers.layout.pieces)

    def _commit_buffers(self, step: Tally, gathered: Sequence[Bytes]) -> None:
        """Every worker keeps its own copy of the buffers and merges all outcomes itself."""
        buffers = self.replica.buffers
        if not buffers.layout.pieces:
            return
        if step.leaves == 1 and not gathered:
            buffers.commit_alone()
            return
        if step.leaves > 1:
            buffers.commit_norms(self.form.of_buffers(step.rows))
        changed = self._changed(step)
        if not changed:
            return
        size = packed_size(changed)
        outcomes = [
            unpack(received[k * size : (k + 1) * size], changed)
            for received, r in zip(gathered, step.ranges, strict=True)
            for k in range(len(r))
        ]
        if step.leaves == 1:
            buffers.load(outcomes[0])
        else:
            buffers.commit_others(step.step, outcomes, step.columns[2])

    def close(self) -> None:
        self.collective.close()
