# SPDX-License-Identifier: Apache-2.0
"""Servers that apply what each worker pushes, when it comes: bounded staleness, or none.

Promise: what a worker pushes is the gradient of one whole step, by that worker alone, on weights
that have all steps up to s - k - 1 (k: `server.staleness`; async: any). Every step is applied
exactly once, whoever computes it and whoever dies. Between meetings (grants.py) members are at
different steps; where hooks act together, all have the same weights: those after the first so many
steps. Which weights those are depends on timing: bits do not repeat.

A turn of the loop is a push. For servers it is push n, in the order of the head (server_turns.py);
for workers it is one of their own, or one that they pass over (worker_turns.py).
"""

from collections.abc import Callable, Iterable

import numpy as np

from manyhands.accounting.deal_micro_batches import Cut, MicroBatch
from manyhands.training.collective.collective import Sizes
from manyhands.training.collective.sequence_words import Bells
from manyhands.training.collective.sockets import Sockets
from manyhands.training.collective.two_level import TwoLevel
from manyhands.training.compute.micro_batch_gradient import LossFn
from manyhands.training.memory.memory import Memory
from manyhands.training.state.kept_optimizer import keep_optimizer
from manyhands.training.state.layout import Unit, share_out, units
from manyhands.training.state.replica import Replica, StepFacts
from manyhands.training.sync.allreduce.allreduce import MeetMembers
from manyhands.training.sync.allreduce.apply_update import Update
from manyhands.training.sync.allreduce.finish_interrupted_step import Regrouping
from manyhands.training.sync.allreduce.merge_buffers import BufferOutcomes
from manyhands.training.sync.allreduce.step_facts import Form
from manyhands.training.sync.canonical_sum import most_parts
from manyhands.training.sync.leaf_gradients import LeafGradients
from manyhands.training.sync.load_meter import LoadMeter
from manyhands.training.sync.merge.board import (
    TALLY_WORDS,
    Board,
    Boards,
    PushOrder,
    Tally,
    tally_of,
)
from manyhands.training.sync.merge.history import Recorder
from manyhands.training.sync.merge.host_rounds import (
    NOWHERE,
    LinePosition,
    Outdated,
    what_is_missing,
)
from manyhands.training.sync.merge.mending import mend
from manyhands.training.sync.merge.relay import Relay
from manyhands.training.sync.merge.seat import MergeParts, Seat
from manyhands.training.sync.merge.server_turns import ServerTurns
from manyhands.training.sync.merge.staleness import AppliedSteps
from manyhands.training.sync.merge.worker_turns import ScratchSums, StepFeed, WorkerTurns
from manyhands.training.sync.sync import Held, Moment, Place
from manyhands.values.config import TrainConfig
from manyhands.values.errors import Broken


class MergeServer:
    def __init__(
        self,
        replica: Replica,
        memory: Memory,
        collective: Callable[[Sizes], MeetMembers],
        train: TrainConfig,
        leaves: LeafGradients,
        feed: StepFeed,
        *,
        bound: int | None,
        heard: Callable[[], int],
        moment: Moment,
        met: Callable[[int, int, Tally], None],
        record: Recorder,
        load: LoadMeter | None = None,
    ) -> None:
        """`feed`: a worker computes the step that it is granted, not that of its place in the loop.
        `met`: told by the head, of a view, what is true after so many pushes. `load`: told what it
        does as a server."""
        self.replica, self.leaves, self.feed = replica, leaves, feed
        replica.clip_norm = train.clip_norm
        layout = replica.layout
        self.cut, undo_log, optimizer = keep_optimizer(replica, memory, seed=train.seed)
        form = Form(len(layout.trainable), replica.buffers.row_width)
        most_leaves = train.micro_batches + 1
        boards = Boards(memory, layout, form.size_bytes(most_leaves))
        updating = Update(
            optimizer,
            Memory(None),
            micro_batches=train.micro_batches,
            moment=moment,
            followers=lambda unit, step: (),
            updated=self._applied,
            begins=self._begins,
        )
        self.parts = MergeParts(
            replica,
            undo_log,
            optimizer,
            updating,
            form,
            boards,
            heard,
            moment,
            bound,
            met,
            load or LoadMeter(),
            record,
        )
        outcomes = BufferOutcomes(replica.buffers, form)
        self.regrouping = Regrouping(
            replica, undo_log, optimizer, form, outcomes, updating, None, self._mend
        )
        self._meet = collective(Sizes(lanes={}, slots=0, message_bytes=8))
        self._scratch = ScratchSums(layout.trainable_sizes, most_parts(most_leaves))
        self._levels: TwoLevel | None = None
        self._role: ServerTurns | WorkerTurns | None = None
        self._mended: Board | None = None
        """The board of the view before, with all that was applied in it."""
        self._unheard: PushOrder | None = None
        """The last of its orders, if this host has not heard it."""

    # ---- a place in a view

    def held(self) -> Held:
        whole = self._role is None or self._role.whole
        return Held(self._holds, self.parts.optimizer.entries(), whole)

    @property
    def _holds(self) -> bool:
        """There is state here, and a board that says which steps are in it: what was taken from
        another host, or begun, is nothing without it."""
        return self.parts.undo_log.holds and self.parts.boards.in_force is not None

    def regroup(self, place: Place) -> None:
        self.close()
        world, boards = place.world, self.parts.boards
        first = [world.ranks_of(host).start for host in range(world.num_hosts)]
        ranks = range(world.num_ranks)
        servers = [rank for rank in ranks if place.speeds[rank] == 0 or rank in first]
        workers = [rank for rank in ranks if rank not in servers]
        here = [rank for rank in servers if rank in world.ranks_of(world.host)]
        serves = world.rank in servers
        self.replica.set_apart(not serves)
        owned = self._units(len(here))
        mine = owned[here.index(world.rank)] if serves else []
        if serves:
            self.parts.load.serve(self.replica.layout, [s for unit in mine for s in unit.spans])
        else:
            self.parts.load.rest()
        self._levels = levels = self._meet(place)
        self._mended = self._unheard = None
        if world.leads_host:
            self._compare(place, levels)
        self.regrouping.regroup(place, levels, mine)
        if place.changes:
            self.replica.change(place.changes)
            self.regrouping.note(place)
        done, board = self.replica.step, boards.of(place.generation)
        if world.leads_host:
            applied = self._agree(levels, done, tells=world.leads)
            if applied is None and place.fresh is None:
                raise Broken("nobody knows which steps are in the state")
            applied = applied or AppliedSteps(done)
            undo_log = self.parts.undo_log
            kept = [*self.replica.weights.values(), *undo_log.slots.values()]
            kept += [*undo_log.scalars.values(), *self.replica.buffers.committed.values()]
            self.parts.record.entered(place.generation, done, applied, kept)
            tally = Tally(applied, ((0, 0, 0),) * world.num_ranks)
            board.begin(done, tally, ranks, world.num_hosts)
            boards.versions[:] = 2 * done
            boards.put_in_force(place.generation)
        levels.meet()
        assert place.due is not None, "somebody knows where they meet"
        bells = Bells(board.bells, world.rank, levels.patience)
        relay = None
        if levels.between is not None:
            assert isinstance(levels.between, Sockets), "the plan allows no other"
            relay = Relay(world, board, levels.between, bells, levels.patience, workers)
        seat = Seat(
            world.rank,
            servers,
            workers,
            board,
            bells,
            [unit for of_server in owned for unit in of_server],
            done,
            place.heard,
            place.due,
            world.leads_host,
            levels.many,
            relay,
        )
        seat.hear(self.parts.heard())
        self._role = (
            ServerTurns(self.parts, seat)
            if serves
            else WorkerTurns(self.parts, seat, self.leaves, self.feed, self._scratch)
        )
        levels.meet()  # nobody writes before all have read
        if relay is not None:
            levels.send(relay.run)

    def _units(self, servers: int) -> list[list[Unit]]:
        layout = self.replica.layout
        shares = share_out(layout, servers, cut=self.cut)
        return [units(layout, spans, cut=self.cut) for spans in shares]

    def _compare(self, place: Place, levels: TwoLevel) -> None:
        """Before anything is mended: whether other hosts have more than this one."""
        undo_log, boards = self.parts.undo_log, self.parts.boards
        missing: PushOrder | Outdated | None = None
        if not self._holds:
            undo_log.void()
        if place.fresh is not None and place.world.host > 0:
            missing = Outdated()
        elif place.fresh is None and (between := levels.between) is not None:
            mine = np.array(self._position().words if undo_log.holds else NOWHERE, np.int64)
            told = levels.carry(lambda: between.gather(mine.view(np.uint8)))
            positions = [LinePosition.from_words(m.view(np.int64).tolist()) for m in told]
            missing = what_is_missing(positions, place.world.host)
        if isinstance(missing, Outdated):
            undo_log.void()
        else:
            self._unheard = missing
        if place.fresh is not None or not undo_log.holds:  # no board speaks of what comes here
            boards.put_in_force(0)

    def _position(self) -> LinePosition:
        board = self.parts.boards.in_force
        if board is None:
            return LinePosition(0, self.parts.undo_log.steps()[0])
        last = board.order(board.ordered - 1) if board.ordered > board.began else None
        return LinePosition(board.generation, board.ordered, last)

    def _mend(self, levels: TwoLevel, rank: int) -> None:
        self._mended = mend(self.parts, rank, self.regrouping.catch_up, self._unheard)

    def _agree(self, levels: TwoLevel, done: int, *, tells: bool) -> AppliedSteps | None:
        """Which steps are in: some host has it written down. None: the state was begun just now.
        `tells`: it is told to the supervisor."""
        words = np.zeros(1 + TALLY_WORDS, np.int64)
        if self._mended is not None:
            words[0], words[1:] = self._mended.generation, self._mended.tally_words()
        told = [words]
        if (between := levels.between) is not None:
            gathered = levels.carry(lambda: between.gather(words.view(np.uint8)))
            told = [message.view(np.int64) for message in gathered]
        known = [words for words in told if words[0] > 0 and words[1] == done]
        if not known:
            return None
        tally = tally_of(known[0][1:])
        assert tally.applied.count == done, "as many steps are in as pushes were applied"
        if tells:
            self.parts.met(int(known[0][0]), done, tally)
        return tally.applied

    def _begins(self, unit: Unit, n: int) -> None:
        self.parts.begins(unit, n)

    def _applied(self, unit: Unit, n: int) -> None:
        self.parts.applied(unit, n)

    # ---- a push

    def indices(self, cut: Cut) -> range:
        granted = isinstance(self._role, WorkerTurns) and self._role.granted == cut.step
        return range(len(cut.sizes)) if granted else range(0)

    def backward(self, cut: Cut, micro_batches: Iterable[MicroBatch], loss: LossFn) -> StepFacts:
        if isinstance(self._role, WorkerTurns):
            return self._role.slot(cut.step, loss)
        assert self._role is not None, "regroup comes first"
        list(micro_batches)  # none; and whoever watches sees that a turn begins
        return self._role.learn(cut.step)

    def step(self) -> None:
        if isinstance(self._role, ServerTurns):
            self._role.apply(self.replica.step)

    def close(self) -> None:
        self._role = None
        if self._levels is not None:
            self._levels.close()
            self._levels = None
