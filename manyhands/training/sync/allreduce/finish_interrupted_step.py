# SPDX-License-Identifier: Apache-2.0
"""How the members of a new view come to one state: afresh, as it was kept, or from one who has it.

**When workers die.** Until the gather is complete nothing has been changed, and the step is
computed again. After it, everything the step needs is in memory that outlives its workers: facts,
partial sums (or, with several hosts, the whole sum), undo logs. So the first worker of the host
mends: units that were being updated are put back, units that are behind are brought forward, the
task's after_step is undone if it was broken off, and called if it was not (after_step.py), and
the step counts as taken by the view that computed its gradients. Nothing is computed twice.

**When hosts die**, the others each hold the whole state, after the same step or (when somebody
died while a step was shared) after two neighbouring ones. Those who are behind, or new, take
everything from one who is not. A host that is taking over is void until it has all of it.

Groups and schedule are each worker's own. Whoever is new reads a note of how they were once, and
takes the schedule's steps since then.
"""

import json
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import numpy as np
import torch

from manyhands.training.collective.collective import FACTS, OUTCOMES
from manyhands.training.collective.two_level import TwoLevel
from manyhands.training.state.layout import Bounds, Unit, blocks, rest_of, share_out, units
from manyhands.training.state.param_groups import groups_to_json
from manyhands.training.state.replica import Replica
from manyhands.training.state.rows.sum_rows import GradientRows
from manyhands.training.state.sharded_optimizer import ShardedOptimizer
from manyhands.training.state.undo_log import UndoLog
from manyhands.training.sync.after_step import AfterStep
from manyhands.training.sync.allreduce.apply_update import Update
from manyhands.training.sync.allreduce.merge_buffers import BufferOutcomes
from manyhands.training.sync.allreduce.partial_sums import parts_of
from manyhands.training.sync.allreduce.step_facts import Form, StepTally
from manyhands.training.sync.sync import Place
from manyhands.training.sync.table_sums import TableSums, bucket_norms, level_tables, scaled
from manyhands.values.errors import Broken


class Regrouping:
    def __init__(
        self,
        replica: Replica,
        undo_log: UndoLog,
        optimizer: ShardedOptimizer,
        form: Form,
        outcomes: BufferOutcomes,
        updating: Update,
        after: AfterStep | None,
        mend: Callable[[TwoLevel, int], None] | None = None,
        tables: TableSums | None = None,
    ) -> None:
        """`mend`: what the first worker of a host does with what it finds, instead of what is told
        above."""
        self.mend, self.tables = mend or self._mend, tables
        self.replica, self.undo_log, self.optimizer = replica, undo_log, optimizer
        self.form, self.outcomes, self.updating, self.after = form, outcomes, updating, after
        self._current = False
        """Whether groups and schedule here are those of `replica.step`."""

    def regroup(self, place: Place, levels: TwoLevel, mine: Sequence[Unit]) -> None:
        """`mine` are the units that this worker updates from now on."""
        world = place.world
        begins = place.fresh is not None and world.host == 0
        if begins:
            self._begin(place, levels, mine)
        elif place.fresh is not None:
            self._current = False
        elif world.leads_host and self.undo_log.holds:
            self.mend(levels, world.local_rank)
        if levels.between is not None:
            levels.carry(lambda: self._level(place, levels))
        elif place.fresh is None and not levels.many and not self.undo_log.holds:
            raise Broken("nobody holds the state any more")
        levels.meet()
        if not begins:
            self._go_on(world.local_rank, mine)
        self.note(place)

    def note(self, place: Place) -> None:
        """Groups and schedule as they are now, between steps, and among how many the update is
        shared out: whoever joins later must know."""
        if place.world.leads_host:
            self.undo_log.updaters[0] = len(place.updaters)
            self.undo_log.put_note(self.replica.step, self._note())

    def _begin(self, place: Place, levels: TwoLevel, mine: Sequence[Unit]) -> None:
        """On the first host, with what the replicas hold; the leader's model is what all start
        from."""
        assert place.fresh is not None
        replica, world, step = self.replica, place.world, place.fresh
        if world.leads:
            replica.publish()
            self.undo_log.reset(step)
            self.undo_log.put_buffers(step, replica.buffers.committed)
            saved = place.averages() if place.averages is not None else {}
            for name, average in replica.averages.items():
                average.reset(step, saved.get(name))
            if self.after is not None:
                self.after.reset(step)
            replica.tables.reset(step, place.tables() if place.tables is not None else ())
        levels.meet()
        replica.adopt()
        replica.step, self._current = step, True
        self.optimizer.regroup(world.local_rank, mine, step, fresh=True)
        if place.entries is not None:
            self.optimizer.load(place.entries())
        self.optimizer.keep_extras(step)
        levels.meet()
        self.note(place)

    def _go_on(self, rank: int, mine: Sequence[Unit]) -> None:
        """With what is kept."""
        step, _ = self.undo_log.steps()
        self.replica.adopt()
        self.catch_up(step)
        self.undo_log.get_buffers(step, self.replica.buffers.committed)
        self.replica.buffers.show()
        self.optimizer.regroup(rank, mine, step)

    # ---- groups and schedule

    def catch_up(self, step: int) -> None:
        """As they are after `step` steps."""
        replica = self.replica
        if not self._current or replica.step > step:  # it may have been ahead of the weights
            found = self.undo_log.get_note()
            assert found is not None, "a view that goes on follows one that began"
            replica.step, note = found
            self._take_note(note)
            # The note may be older than a change that was made at its very step.
            replica.change(replica.changes.get(replica.step, {}))
        while replica.step < step:
            if replica.step + 1 == step:
                self.optimizer.take_groups(step)
            replica.advance()
        replica.hear_journal()

    def _note(self) -> bytes:
        replica = self.replica
        groups, schedules = groups_to_json(replica.optimizer), replica.schedules.to_json()
        return json.dumps([replica.step, groups, schedules]).encode()

    def _take_note(self, note: bytes) -> None:
        replica = self.replica
        replica.step, groups, saved = json.loads(note)
        replica.schedules.restore(groups, saved, replica.step)
        self._current = True

    # ---- after a death

    def _mend(self, levels: TwoLevel, rank: int) -> None:
        """Bring everything that is kept to the end of the newest step that anybody began to take.

        Idempotent: whoever mends can die too.
        """
        self.undo_log.repair()
        for average in self.replica.averages.values():
            average.repair()
        low, high = self.undo_log.steps()
        if self.tables:
            tables = self.tables.tables
            tables.own(rank, 0, 1)
            tables.repair()
            low, high = min(low, tables.steps()[0]), max(high, tables.steps()[1])
        if self.after is not None:
            self.after.undo(high)
        committed = self.replica.buffers.committed
        if not self.undo_log.get_buffers(high, committed):
            whole = self.undo_log.get_buffers(high - 1, committed)
            assert whole, f"buffers of step {high - 1} are kept until those of {high} are"
            step = self._recall(levels, high - 1)
            if step.not_finite() is None:
                self.outcomes.commit(step, levels.recall(OUTCOMES, high - 1))
            self.replica.loss_scale.after(skipped=step.not_finite() is not None)
            self.undo_log.put_buffers(high, committed)
        if low < high:  # after the buffers: the update looks at what was merged
            self.catch_up(low)
            self._finish_step(levels, rank, self._recall(levels, low))
        if self.after is not None:
            self.after.catch_up(high)
        for average in self.replica.averages.values():
            average.finish(high, rank)
        self.undo_log.summed[:] = 0
        if told := levels.recall(FACTS, high - 1):  # they may all be new who are here now
            self.replica.facts = self.form.facts(self.form.read(high - 1, told), told)

    def _recall(self, levels: TwoLevel, step: int) -> StepTally:
        return self.form.read(step, levels.recall(FACTS, step))

    def _finish_step(self, levels: TwoLevel, rank: int, step: StepTally) -> None:
        """Update what the members of the view before this one did not get to."""
        layout, cut, updating = self.replica.layout, self.optimizer.cut, self.updating
        summed = int(self.undo_log.summed[0]) == step.step + 1
        updaters = self.undo_log.summed[1] if summed else self.undo_log.updaters[0]
        spans = share_out(layout, int(updaters), cut=cut)
        done = self.undo_log.done
        left = [
            rest_of(layout, unit, done, step.step)
            for owned in spans
            for unit in units(layout, owned, cut=cut)
        ]
        behind = [unit for unit in left if unit is not None]
        self.optimizer.regroup(rank, behind, step.step, own=True)
        if step.not_finite() is not None:
            self.optimizer.pass_over(step.step)
            self.replica.tables.pass_over(step.step)
            return
        gradients: list[GradientRows] = []
        if self.tables:
            whole = (len(step.ranges), step.leaves, step.divisor)
            gradients = self.tables.gradients(step.step, *whole)
        every = [block for owned in spans for block in blocks(owned)]
        norms = partial(updating.summed_norms if summed else updating.norms, step)
        factor = updating.clip_factor(
            step, lambda: np.concatenate([norms(every), bucket_norms(gradients)])
        )
        found = [scaled(gradient, factor) for gradient in gradients]
        rate = self.replica.tables.rate(self.replica.optimizer)
        self.replica.tables.apply(found, step.step, rate)
        with torch.no_grad():
            if summed:
                updating.update_summed(step, factor)
                return
            parts = parts_of([levels.left_by(r) for r in range(len(step.ranges))], step)
            updating.update(step, parts, updating.whole, factor)

    # ---- after the loss of a host, or when one is new

    def _level(self, place: Place, levels: TwoLevel) -> None:
        """Between hosts: those who are behind take everything from one who is not."""
        undo_log, here, between = self.undo_log, levels.world.host, levels.between
        assert between is not None
        holds = undo_log.holds and (place.fresh is None or here == 0)
        reached = np.array([undo_log.steps()[0] if holds else -1], dtype=np.int64)
        steps = [int(m.view(np.int64)[0]) for m in between.gather(reached.view(np.uint8))]
        step, holder = max(steps), steps.index(max(steps))
        if step < 0:
            raise Broken("no host of this view holds the state any more")
        if min(steps) == step:
            return
        receives = steps[here] < step
        if receives:
            undo_log.void()
        note, extras = (b"", b"") if receives else (self._kept_note(), undo_log.pack_extras(step))
        averages = self.replica.averages.values()
        counts = [average.count for average in averages]
        head = np.array([len(note), len(extras), int(undo_log.exists.any()), *counts], np.int64)
        told = between.gather(head.view(np.uint8))[holder].view(np.int64).tolist()
        text = torch.zeros(told[0] + told[1], dtype=torch.uint8)
        if here == holder:
            text[:] = torch.frombuffer(bytearray(note + extras), dtype=torch.uint8)
        buffers = {d: torch.zeros_like(c) for d, c in self.replica.buffers.committed.items()}
        if not receives:
            undo_log.get_buffers(step, buffers)
        lanes = [text, *self.replica.weights.values(), *buffers.values(), undo_log.exists]
        if told[2]:
            lanes += [*undo_log.slots.values(), *undo_log.scalars.values()]
        for average, count in zip(averages, told[3:], strict=True):
            lanes += average.lanes.values() if count else ()
        for lane in lanes:
            if lane.numel():
                owned: list[Bounds] = [{lane.dtype: (0, 0)}] * len(steps)
                owned[holder] = {lane.dtype: (0, len(lane))}
                between.share({lane.dtype: lane}, owned)
        level_tables(self.replica.tables, between, levels.world, holder, step, receives=receives)
        if receives:
            received = text.numpy().tobytes()
            for average, count in zip(averages, told[3:], strict=True):
                average.hold(step, count)
            if self.after is not None:
                self.after.reset(step)
            undo_log.take(step, buffers)
            undo_log.unpack_extras(step, received[told[0] :])
            at, words = msgspec.msgpack.decode(received[: told[0]], type=tuple[int, bytes])
            undo_log.put_note(at, words)

    def _kept_note(self) -> bytes:
        found = self.undo_log.get_note()
        assert found is not None, "who holds the state has a note"
        return msgspec.msgpack.encode(found)
