# SPDX-License-Identifier: Apache-2.0
"""Every worker computes some micro-batches; all agree on the canonical sum of their gradients.

Promise: when `step` returns, every worker of the view sees the same weights, bit for bit those
that one worker would have computed alone.

A step, on worker r with its range of micro-batches:

    (embed)       for a loss over the whole batch: cached_gradients.py
    compute       each leaf's gradient is added into r's slots as far as the tree allows
    gather        losses, touched parameters, buffer statistics; everyone's slots are now complete
    (clip)        r finishes the tree for its stretch; norms of fixed blocks are gathered
    update        unit by unit: finish the tree, then r's part of the optimizer, under an undo log
    share         a meeting: everyone has the new weights
    (after)       the task's after_step, on each host's first worker, and another meeting

With several hosts the sum is finished between them before the gather is (overlapped_host_sum.py),
and each host takes the step on its own: the whole state is with each of them.

What becomes of a step in which somebody dies is told in finish_interrupted_step.py.
"""

import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import Module

from manyhands.accounting.deal_micro_batches import Cut, MicroBatch, deal, subtrees
from manyhands.training.collective.collective import (
    EMBEDDINGS,
    FACTS,
    NORMS,
    OUTCOMES,
    Bytes,
    Meanwhile,
    Sizes,
    nothing,
)
from manyhands.training.collective.two_level import TwoLevel
from manyhands.training.compute.micro_batch_gradient import Leaf, LossFn, digest
from manyhands.training.memory.memory import Memory
from manyhands.training.state.followers import Follower
from manyhands.training.state.kept_optimizer import keep_optimizer
from manyhands.training.state.layout import Unit, blocks, bounds, share_out, units
from manyhands.training.state.replica import Replica, StepFacts
from manyhands.training.state.rows.sum_rows import GradientRows
from manyhands.training.sync.after_step import AfterStep
from manyhands.training.sync.allreduce.apply_update import Update
from manyhands.training.sync.allreduce.finish_interrupted_step import Regrouping
from manyhands.training.sync.allreduce.local_sum import LocalSum
from manyhands.training.sync.allreduce.merge_buffers import BufferOutcomes
from manyhands.training.sync.allreduce.overlapped_host_sum import OverlappedHostSum
from manyhands.training.sync.allreduce.partial_sums import Parts, parts_of
from manyhands.training.sync.allreduce.step_facts import Form, StepTally
from manyhands.training.sync.canonical_sum import TreeSum, most_parts
from manyhands.training.sync.leaf_gradients import GatherBytes, LeafGradients
from manyhands.training.sync.load_meter import LoadMeter
from manyhands.training.sync.sync import Auditor, Held, Moment, Place
from manyhands.training.sync.table_sums import TableSums, bucket_norms, scaled
from manyhands.values.config import TrainConfig

MeetMembers = Callable[[Place], TwoLevel]
"""How the members of a view reach each other, given this worker's place in it."""


class AllReduce:
    def __init__(
        self,
        replica: Replica,
        memory: Memory,
        collective: Callable[[Sizes], MeetMembers],
        train: TrainConfig,
        leaves: LeafGradients,
        *,
        heard: Callable[[], int],
        moment: Moment,
        auditor: Auditor,
        after_step: Callable[[Module], Any] | None = None,
        load: LoadMeter | None = None,
    ) -> None:
        """`heard` gives the number of the last command that has reached this worker. `load`: told
        what it does as a server."""
        self.load = load or LoadMeter()
        self.replica, self.heard, self.moment = replica, heard, moment
        self.auditor, self.leaves = auditor, leaves
        self.skips = train.not_finite == "skip"
        replica.clip_norm = train.clip_norm
        layout = replica.layout
        kept = keep_optimizer(replica, memory, seed=train.seed)
        self.cut, self.undo_log, self.optimizer = kept
        self.form = Form(len(layout.trainable), replica.buffers.row_width)
        self.outcomes = BufferOutcomes(replica.buffers, self.form)
        self.updating = Update(
            self.optimizer,
            memory,
            micro_batches=train.micro_batches,
            moment=moment,
            followers=self._followers,
            updated=self._updated,
            has_tables=bool(replica.tables),
        )
        self.tables = TableSums(replica.tables, memory)
        self.after = after_step and AfterStep(
            after_step,
            replica,
            memory,
            seed=train.seed,
            put_buffers=self.undo_log.put_buffers,
            moment=moment,
        )
        self.regrouping = Regrouping(
            replica,
            self.undo_log,
            self.optimizer,
            self.form,
            self.outcomes,
            self.updating,
            self.after,
            tables=self.tables,
        )
        most_leaves = train.micro_batches + 1  # a last record joins the batch before it
        self._meet = collective(
            Sizes(
                lanes=layout.trainable_sizes,
                slots=most_parts(most_leaves),
                message_bytes=max(
                    self.form.size_bytes(most_leaves),
                    8 * (layout.first_blocks[-1] + self.tables.norms_size),
                    self.outcomes.most_bytes(most_leaves),
                    leaves.most_bytes,
                ),
            )
        )
        self._trainable = [replica.parameters[p.name] for p in layout.trainable]
        self._step: StepTally | None = None
        self._levels: TwoLevel | None = None
        self.overlap = train.overlap
        self.reducing: OverlappedHostSum | None = None

    # ---- a place in a view

    def held(self) -> Held:
        return Held(self.undo_log.holds, self.optimizer.entries())

    def regroup(self, place: Place) -> None:
        self.world, self.speeds = place.world, place.speeds
        self.close()
        self._levels = self.levels = self._meet(place)
        layout = self.replica.layout
        self.summing = LocalSum(layout.trainable, self._trainable, self.levels.slots)
        self._step = None
        # The updaters of a host share out what is in its memory, and that is everything.
        self.rank, self.updaters = self.world.local_rank, place.updaters
        # Who updates nothing reads nothing in an update, and is waited for in the next gather.
        self._awaited = [rank for rank in self.updaters if rank != self.rank]
        shares = share_out(layout, len(self.updaters), cut=self.cut)
        owned = dict(zip(self.updaters, shares, strict=True))
        self.spans = [owned.get(rank, []) for rank in range(self.world.local_ranks)]
        self.bounds = [bounds(spans) for spans in self.spans]
        self.blocks = [blocks(spans) for spans in self.spans]
        many = self.levels.many
        self.reducing = OverlappedHostSum(layout, self.levels, self.updating.sums) if many else None
        mine = units(layout, self.spans[self.rank], cut=self.cut)
        if self.speeds[self.world.rank] == 0:
            self.load.serve(layout, self.spans[self.rank])
        else:
            self.load.rest()
        self.regrouping.regroup(place, self.levels, mine)
        part = self.updaters.index(self.rank) if self.rank in self.updaters else None
        self.replica.tables.own(self.rank, part, len(self.updaters))
        if place.changes:
            self.replica.change(place.changes)
            self.regrouping.note(place)

    # ---- a step

    def indices(self, cut: Cut) -> range:
        return deal(len(cut.sizes), self.speeds)[self.world.rank]

    def backward(self, cut: Cut, micro_batches: Iterable[MicroBatch], loss: LossFn) -> StepFacts:
        self.replica.turn_to(cut.step)
        mine = self.indices(cut)
        ranges = deal(len(cut.sizes), self.speeds)
        computing = sum(speed > 0 for speed in self.speeds)
        audited = self.auditor.index(cut) if computing > 1 else None
        sheet = self.form.sheet(max(len(r) for r in ranges))
        self.outcomes.begin()
        self.tables.begin(len(cut.sizes))
        tree = self.summing.tree(len(cut.sizes))
        micro_batches = self.leaves.begin(cut, micro_batches, loss, self._gather_for(cut))
        if self.reducing is not None:  # last: from here on the courier is busy with gradients
            self.reducing.begin(ranges, len(cut.sizes), partial(self._summed, cut.step))
        for row, micro_batch in zip(sheet.rows[: len(mine)], micro_batches, strict=True):
            last = micro_batch.index == mine[-1] and self.reducing is not None
            leaf = self._leaf(cut, tree, micro_batch, loss, streamed=last)
            self.moment("leaf")
            of_tables = self.replica.tables.take_gradients()
            self.tables.add(micro_batch.index, of_tables)
            if micro_batch.index == audited:
                rows = [t for gradient in of_tables for t in gradient.tensors()]
                sheet.digest = digest(self._trainable, leaf, rows)
            sheet.fill(row, micro_batch, leaf, self._trainable)
            self.outcomes.note(row)
            if last and self.reducing is not None:
                self.summing.collect_rest(tree, micro_batch.index, self.reducing.finished)
            else:
                self.summing.collect(tree, micro_batch.index)
        if audited is not None and self._is_witness(cut, audited):
            sheet.digest = self.auditor.digest(cut, audited)
        self.moment("gather")
        if self.reducing is not None:
            self.reducing.everything()
        if self.tables:
            self.replica.tables.see_room(cut.step)
            self._put_tables(cut.step)
        reach = max(self.summing.reach(tree), self.tables.reach())
        scale = self.replica.loss_scale
        message = sheet.signed(self.heard(), mine, self.replica.clip_norm, reach, scale.value)
        # The first unit is copied aside while the others are waited for.
        prepare = partial(self.optimizer.prepare, cut.step)
        everyone = self.levels.gather(message, FACTS, cut.step, prepare)
        self._step = self.form.read(cut.step, everyone)
        skips = self.skips or scale.excuses(self._step.not_finite())
        return self.form.learn(cut, self._step, everyone, audited, skips=skips)

    def _put_tables(self, step: int) -> None:
        """Where all find them who come to know of this step."""
        mine = self.tables.put(self.world.rank, step)
        if self.levels.many:
            self.tables.exchange(self.levels, step, mine)

    def _gather_for(self, cut: Cut) -> GatherBytes | None:
        if self.world.num_ranks == 1:
            return None
        return lambda mine: self.levels.gather(mine, EMBEDDINGS, cut.step)

    def _leaf(
        self, cut: Cut, tree: TreeSum[int], micro_batch: MicroBatch, loss: LossFn, *, streamed: bool
    ) -> Leaf:
        """Compute a micro-batch; the last one's gradients are passed on as they come."""
        during = nullcontext()
        if streamed and self.reducing is not None:
            during = self.summing.streamed(
                tree, micro_batch.index, self.reducing.finished, at_once=self.overlap
            )
        return self.leaves.compute(cut, micro_batch, loss, during)

    def _summed(self, step: int) -> None:
        """The whole sum of a step is in this host's memory."""
        self.undo_log.summed[:] = step + 1, len(self.updaters)

    def _is_witness(self, cut: Cut, index: int) -> bool:
        """The worker after the one that this micro-batch is dealt to computes it too."""
        ranges = deal(len(cut.sizes), self.speeds)
        computing = [rank for rank, speed in enumerate(self.speeds) if speed > 0]
        owner = next(k for k, rank in enumerate(computing) if index in ranges[rank])
        return self.world.rank == computing[(owner + 1) % len(computing)]

    def step(self) -> None:
        assert self._step is not None, "backward comes first"
        step, self._step = self._step, None
        skipped = step.not_finite() is not None
        for average in self.replica.averages.values():
            average.plan(step.step, skipped=skipped)
        if skipped:
            self._skip(step)
            return
        if self.after is not None:
            self.after.plan(step.step)
        with torch.no_grad():
            outcomes = self._gather_outcomes(step)
            self.outcomes.commit(step, outcomes)
            self.replica.loss_scale.after(skipped=False)
            self.moment("update")
            began = time.monotonic()
            if self.reducing is None:
                self._update(step)
            else:
                self._update_summed(step)
            self.load.applied(time.monotonic() - began)
            if self.rank == self._changes_buffers:
                self.undo_log.put_buffers(step.step + 1, self.replica.buffers.committed)
            self.moment("share")
            self.levels.meet(self._meanwhile(step.step), awaited=self._awaited)
            if self.cut == "nowhere" and self.rank != self._changes_buffers:
                self.undo_log.get_buffers(step.step + 1, self.replica.buffers.committed)
                self.optimizer.take_groups(step.step + 1)
            if self.after is not None:
                self._run_after(self.after, step.step)
                if not self.world.leads_host:
                    self.undo_log.get_buffers(step.step + 1, self.replica.buffers.committed)

    @property
    def _changes_buffers(self) -> int:
        """Who of this host keeps them safe: whose optimizer, with its hooks, may change them."""
        return self.updaters[0] if self.cut == "nowhere" else 0

    def _meanwhile(self, step: int) -> Meanwhile:
        """Before the others are waited for: what after_step needs, unless somebody's optimizer may
        still be changing the buffers."""
        if self.after is None or not self.world.leads_host or self.cut == "nowhere":
            return nothing
        return partial(self.after.prepare, step)

    def _run_after(self, after: AfterStep, step: int) -> None:
        """On weights that all have; averages are taken of what it makes of them."""
        if self.world.leads_host:
            if self.cut == "nowhere":
                after.prepare(step)
            self.moment("after")
            after.run(step)
        self.levels.meet()
        if self.replica.averages:
            for unit in self.optimizer.units:
                self._average(unit, step)
            self.levels.meet()

    def _skip(self, step: StepTally) -> None:
        """It is over, and nothing has changed. Whoever mends it finds that out from its facts."""
        self.moment("update")
        self.optimizer.pass_over(step.step)
        self.replica.tables.pass_over(step.step)
        for unit in self.optimizer.units:
            self._average(unit, step.step)
        self.replica.loss_scale.after(skipped=True)
        if self.world.leads_host:
            self.undo_log.put_buffers(step.step + 1, self.replica.buffers.committed)
        self.moment("share")
        self.levels.meet()

    def _updated(self, unit: Unit, step: int) -> None:
        """A unit's weights are those after step `step`, of the optimizer."""
        if self.after is not None:
            self.after.copy_aside(unit)
        else:
            self._average(unit, step)

    def _average(self, unit: Unit, step: int) -> None:
        for average in self.replica.averages.values():
            average.take(unit, step, self.rank)

    def _followers(self, unit: Unit, step: int) -> list[Follower]:
        """The same, while a native pass has them in the cache; none: nothing, or not so."""
        if self.after is not None:
            return self.after.follower(unit)
        averages = self.replica.averages.values()
        return [f for average in averages for f in average.follower(unit, step, self.rank)]

    def _update(self, step: StepTally) -> None:
        """With everybody's partial sums, which are all on this host."""
        parts, tables = self._exchange(step), self._table_gradients(step)
        rate = self.replica.tables.rate(self.replica.optimizer)
        looks = step.clip_norm is not None or step.may_overflow
        factor = self._clip_factor(step, parts, tables) if looks else 1.0
        self.updating.update(step, parts, self.bounds[self.rank], factor)
        self._update_tables(step, tables, factor, rate)

    def _update_summed(self, step: StepTally) -> None:
        """With the sum over all hosts."""

        tables = self._table_gradients(step)
        rate = self.replica.tables.rate(self.replica.optimizer)

        def norms() -> NDArray[np.float64]:
            mine = self.updating.summed_norms(step, self.blocks[self.rank])
            return self._gather_norms(step, mine, tables)

        looks = step.clip_norm is not None or step.may_overflow
        factor = self.updating.clip_factor(step, norms) if looks else 1.0
        self.updating.update_summed(step, factor)
        self._update_tables(step, tables, factor, rate)

    def _table_gradients(self, step: StepTally) -> list[GradientRows]:
        """Of the buckets that are this worker's. Who has none does not look into the boxes: it is
        not waited for (regroup), and they may be of the next step."""
        if not self.tables or self.rank not in self.updaters:
            return [table.nothing() for table in self.replica.tables]
        return self.tables.gradients(step.step, len(step.ranges), step.leaves, step.divisor)

    def _update_tables(
        self, step: StepTally, found: list[GradientRows], factor: float, rate: float
    ) -> None:
        if self.tables:
            self.moment("rows")
            gradients = [scaled(gradient, factor) for gradient in found]
            self.replica.tables.apply(gradients, step.step, rate)

    def _gather_outcomes(self, step: StepTally) -> list[Bytes]:
        """Everyone's outcomes of the buffers that are merged by value, if any changed."""
        if step.leaves == self.world.num_ranks == 1 and not self.undo_log.journals:
            return []  # in memory that outlives us: whoever mends must find them
        message = self.outcomes.message(step, self.world.rank)
        return [] if message is None else self.levels.gather(message, OUTCOMES, step.step)

    def _exchange(self, step: StepTally) -> Parts:
        """This worker's stretch of everybody's partial sums."""
        counts = [len(subtrees(r, step.leaves)) for r in step.ranges]
        return parts_of(self.levels.exchange(counts, self.bounds), step)

    def _clip_factor(self, step: StepTally, parts: Parts, tables: list[GradientRows]) -> float:
        """What the gradient is multiplied with. This worker's stretch of it is left in the sums."""
        rank = self.rank
        self.updating.finish_into_sums(step, parts, self.bounds[rank], self.spans[rank])

        def norms() -> NDArray[np.float64]:
            return self._gather_norms(step, self.updating.norms(step, self.blocks[rank]), tables)

        return self.updating.clip_factor(step, norms)

    def _gather_norms(
        self, step: StepTally, mine: NDArray[np.float64], tables: list[GradientRows]
    ) -> NDArray[np.float64]:
        """Of all blocks, each from the worker of this host that owns it, and of all buckets."""
        counts = [len(b) for b in self.blocks]
        most, of_tables = max(counts), bucket_norms(tables)
        norms = np.zeros(most + len(of_tables))
        norms[: len(mine)] = mine
        norms[most:] = of_tables
        everyone = self.levels.gather_here(norms.view(np.uint8), NORMS, step.step)
        found = [m.view(np.float64) for m in everyone]
        rows = [m[:n] for m, n in zip(found, counts, strict=True)]
        # Of each bucket one has the norm, and the others have 0.
        return np.concatenate([*rows, np.sum([m[most:] for m in found], axis=0)])

    def close(self) -> None:
        if self._levels is not None:
            self._levels.close()
            self._levels = None
