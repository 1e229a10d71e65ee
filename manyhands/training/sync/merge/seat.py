# SPDX-License-Identifier: Apache-2.0
"""What servers and workers of a view both need: the parts they work with, and their place in it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from manyhands.accounting.deal_micro_batches import root
from manyhands.training.collective.sequence_words import Bells
from manyhands.training.state.layout import Layout, Unit
from manyhands.training.state.replica import Replica
from manyhands.training.state.sharded_optimizer import ShardedOptimizer
from manyhands.training.state.undo_log import UndoLog
from manyhands.training.sync.allreduce.apply_update import Update
from manyhands.training.sync.allreduce.partial_sums import Parts
from manyhands.training.sync.allreduce.step_facts import Form, StepTally
from manyhands.training.sync.load_meter import LoadMeter
from manyhands.training.sync.merge.board import HEARD, HELD, PUSHED, Board, Boards, StepPush, Tally
from manyhands.training.sync.merge.history import Recorder
from manyhands.training.sync.merge.relay import Relay
from manyhands.training.sync.sync import Moment

T = TypeVar("T")


@dataclass(frozen=True)
class MergeParts:
    """Those of one process, whichever role it has."""

    replica: Replica
    undo_log: UndoLog
    optimizer: ShardedOptimizer
    updating: Update
    form: Form
    boards: Boards
    heard: Callable[[], int]
    moment: Moment
    bound: int | None
    """Of staleness; None: there is none."""
    met: Callable[[int, int, Tally], None]
    """Told by the head, of a view (its generation): what is true after so many pushes."""
    load: LoadMeter
    """Told by a server what it does."""
    record: Recorder

    @property
    def layout(self) -> Layout:
        return self.replica.layout

    def begins(self, unit: Unit, n: int) -> None:
        """StepPush n is about to be applied to a unit."""
        self.boards.versions[unit.blocks[0]] = 2 * n + 1

    def applied(self, unit: Unit, n: int) -> None:
        self.boards.versions[unit.blocks[0]] = 2 * n + 2

    def read(self, push: StepPush, n: int) -> StepTally:
        """As push n. It is finite, and its factor is known."""
        tally = self.form.read(n, [push.facts])
        tally.clip_norm, tally.reaches = None, [0.0]
        return tally

    def apply(self, push: StepPush, tally: StepTally) -> None:
        """To the units that are worked on here; `tally`: as `read` gives it."""
        self.updating.update(tally, gradient_of(push, tally), self.updating.whole, push.factor)

    def commit_buffers(self, tally: StepTally) -> None:
        """Statistics compose: what a push adds to them does not depend on what they were."""
        buffers = self.replica.buffers
        buffers.commit_norms(self.form.of_buffers(tally.rows))
        self.undo_log.put_buffers(tally.step + 1, buffers.committed)


def gradient_of(push: StepPush, tally: StepTally) -> Parts:
    """The whole sum, which one worker has put together."""
    return [(root(tally.leaves), push.gradient)]


@dataclass(frozen=True)
class Seat:
    """A place in a view."""

    rank: int
    servers: Sequence[int]
    """Ranks; the first of them is the head."""
    workers: Sequence[int]
    board: Board
    bells: Bells
    units: Sequence[Unit]
    """All of them, whoever updates them."""
    began: int
    """With so many pushes applied."""
    told: int
    """Commands that were given before."""
    due: Callable[[int], int]
    speaks: bool
    """For its host: it is the first of its members, and serves."""
    many: bool
    """There are other hosts."""
    relay: Relay | None = None
    """Who speaks for one of several hosts has one."""

    @property
    def head(self) -> int:
        return self.servers[0]

    @property
    def everyone(self) -> list[int]:
        return [*self.servers, *self.workers]

    @property
    def acknowledged(self) -> int:
        """The word by which pushes count: they are where they outlive a process; a host, if there
        are several."""
        return HELD if self.many else PUSHED

    def wait(self, look: Callable[[], T | None]) -> T:
        """As `Bells.wait`, for as long as other hosts are there."""
        relay = self.relay
        if relay is None:
            return self.bells.wait(look)

        def seen() -> T | None:
            if (found := look()) is None:
                relay.check()
            return found

        return self.bells.wait(seen)

    def say(self, word: int, value: int) -> None:
        self.board.rows[self.rank, word] = value

    def hear(self, heard: int) -> None:
        """Let the head know the last command that came here."""
        self.board.rows[self.rank, HEARD] = heard
