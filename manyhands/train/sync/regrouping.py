# SPDX-License-Identifier: Apache-2.0
"""How the members of a new view come to one state: afresh, as it was kept, or from one who has it.

**When workers die** (shared memory). Until the gather is complete nothing has been changed, and the
step is computed again. After it, everything the step needs is in memory that outlives its workers:
facts, partial sums, undo logs. So the leader mends: units that were being updated are put back,
units that are behind are brought forward, and the step counts as taken by the view that computed
its gradients. Nothing is computed twice.

Where every worker has memory of its own, each holds the whole state of the last step that it took,
and those who are behind copy it from one who is not.

Groups and schedule are each worker's own. Whoever is new reads a note of how they were once, and
takes the schedule's steps since then.
"""

import json
from collections.abc import Sequence

import numpy as np
import torch

from manyhands.train.collective.contract import FACTS, OUTCOMES, Bounds, Collective
from manyhands.train.groups import groups_to_json, restore, schedule_to_json
from manyhands.train.keep import Keep
from manyhands.train.layout import Unit, blocks, share_out, units
from manyhands.train.optim import SharedOut
from manyhands.train.state import Replica
from manyhands.train.sync.contract import Place
from manyhands.train.sync.facts import Form, Tally
from manyhands.train.sync.finishing import parts_of
from manyhands.train.sync.outcomes import Outcomes
from manyhands.train.sync.updating import Updating
from manyhands.world import World


class Regrouping:
    def __init__(
        self,
        replica: Replica,
        keep: Keep,
        optimizer: SharedOut,
        form: Form,
        outcomes: Outcomes,
        updating: Updating,
    ) -> None:
        self.replica, self.keep, self.optimizer = replica, keep, optimizer
        self.form, self.outcomes, self.updating = form, outcomes, updating
        self._current = False
        """Whether groups and schedule here are those of `replica.step`."""

    def regroup(self, place: Place, collective: Collective, mine: Sequence[Unit]) -> None:
        """`mine` are the units that this worker updates from now on."""
        world = place.world
        if place.fresh is not None:
            self._begin(place, place.fresh, collective, mine)
        elif self.keep.journals:
            if world.leads:
                self._mend(collective, world.rank)
            self._wait_for_all(collective, world)
            self._go_on(world.rank, mine)
        else:
            self._copy_from_newest(collective, world, mine)
        self.note(place)

    def note(self, place: Place) -> None:
        """Groups and schedule as they are now, between steps: whoever joins later must know."""
        if place.world.leads and self.keep.journals:
            self.keep.put_note(place.generation, self.replica.step, self._note())

    def _wait_for_all(self, collective: Collective, world: World) -> None:
        nothing: Bounds = dict.fromkeys(self.replica.weights, (0, 0))
        collective.share(self.replica.weights, [nothing] * world.num_ranks)

    def _begin(self, place: Place, step: int, collective: Collective, mine: Sequence[Unit]) -> None:
        """With what the replicas hold; the leader's model is what all start from."""
        replica, world = self.replica, place.world
        if world.leads or not self.keep.journals:
            replica.publish()
            self.keep.reset(step)
            self.keep.put_buffers(step, replica.buffers.committed)
        everything = {dtype: (0, len(lane)) for dtype, lane in replica.weights.items()}
        nothing: Bounds = dict.fromkeys(everything, (0, 0))
        collective.share(replica.weights, [everything] + [nothing] * (world.num_ranks - 1))
        replica.adopt()
        replica.step, self._current = step, True
        self.optimizer.regroup(world.rank, mine, step, fresh=True)
        if place.entries is not None:
            self.optimizer.load(place.entries())
            self.optimizer.keep_extras(step)
        self._wait_for_all(collective, world)

    def _go_on(self, rank: int, mine: Sequence[Unit]) -> None:
        """With what is kept."""
        step, _ = self.keep.steps()
        self.replica.adopt()
        self._catch_up(step)
        self.keep.get_buffers(step, self.replica.buffers.committed)
        self.replica.buffers.show()
        self.optimizer.regroup(rank, mine, step)

    # ---- groups and schedule

    def _catch_up(self, step: int) -> None:
        """As they are after `step` steps."""
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

    def _mend(self, collective: Collective, rank: int) -> None:
        """Bring everything that is kept to the end of the newest step that anybody began to take.

        Idempotent: whoever mends can die too.
        """
        self.keep.repair()
        low, high = self.keep.steps()
        if low < high:
            self._catch_up(low)
            self._finish_step(collective, rank, self._recall(collective, low))
        committed = self.replica.buffers.committed
        if not self.keep.get_buffers(high, committed):
            whole = self.keep.get_buffers(high - 1, committed)
            assert whole, f"buffers of step {high - 1} are kept until those of {high} are"
            told = collective.recall(OUTCOMES, high - 1)
            self.outcomes.commit(self._recall(collective, high - 1), told)
            self.keep.put_buffers(high, committed)

    def _recall(self, collective: Collective, step: int) -> Tally:
        return self.form.read(step, collective.recall(FACTS, step))

    def _finish_step(self, collective: Collective, rank: int, step: Tally) -> None:
        """Update what the members of the view before this one did not get to."""
        layout, cut, updating = self.replica.layout, self.optimizer.cut, self.updating
        spans = share_out(layout, len(step.ranges), cut=cut)
        behind = [
            unit
            for owned in spans
            for unit in units(layout, owned, cut=cut)
            if self.keep.done[unit.blocks[0]] == step.step
        ]
        parts = parts_of([collective.left_by(r) for r in range(len(step.ranges))], step)
        # The sums of a step in progress are all there.
        every = [block for owned in spans for block in blocks(owned)]
        factor = updating.clip_factor(step, lambda: updating.norms(every))
        self.optimizer.regroup(rank, behind, step.step, own=True)
        with torch.no_grad():
            updating.update(step, parts, updating.whole, factor)

    # ---- after a death: every worker has its own memory

    def _copy_from_newest(self, collective: Collective, world: World, mine: Sequence[Unit]) -> None:
        """Those who are behind, or new, take everything from one who is not."""
        replica, rank = self.replica, world.rank
        reached = np.array([replica.step if self._current else -1], dtype=np.int64)
        steps = [int(m.view(np.int64)[0]) for m in collective.gather(reached.view(np.uint8))]
        holder = steps.index(max(steps))
        if min(steps) == max(steps):
            return
        note, extras = self._note(), self.optimizer.pack()
        sizes = np.array([len(note), len(extras)], dtype=np.int64)
        everyone = collective.gather(sizes.view(np.uint8))
        lengths = [int(n) for n in everyone[holder].view(np.int64)]
        message = np.zeros(sum(lengths), dtype=np.uint8)
        if rank == holder:
            message[:] = np.frombuffer(note + extras, dtype=np.uint8)
        received = collective.gather(message)[holder].tobytes()
        lanes = [*replica.weights.values(), *replica.buffers.committed.values()]
        lanes += [*self.keep.slots.values(), *self.keep.scalars.values(), self.keep.exists]
        for lane in lanes:
            if lane.numel():
                owned: list[Bounds] = [{lane.dtype: (0, 0)}] * world.num_ranks
                owned[holder] = {lane.dtype: (0, len(lane))}
                collective.share({lane.dtype: lane}, owned)
        if steps[rank] < max(steps):
            replica.adopt()
            self._take_note(received[: lengths[0]])
            replica.buffers.show()
            self.optimizer.regroup(rank, mine, replica.step)
            self.optimizer.unpack(received[lengths[0] :])
