# SPDX-License-Identifier: Apache-2.0
"""A stream as a worker reads it: from the process that reads it for all workers of the host or, for
want of one, itself. The bits are the same.

Who begins to read it somewhere, whoever that is, first tells the digest of the batch before: it is
in the ledger, and must be what it was. So a stream that gives other records when it is read again
is found out before anything is trained on them.
"""

from typing import Any

from manyhands.accounting.deal_micro_batches import Cut
from manyhands.accounting.read_digests import joined_digest
from manyhands.data.reading.batch_digest import batch_digest
from manyhands.data.reading.micro_batch_feed import MicroBatchFeed
from manyhands.launch.wire.control_channel import WorkerChannel
from manyhands.values.errors import TaskError
from manyhands.values.messages import Notice, Read
from manyhands.values.printable_text import printable
from manyhands.values.worker_orders import Orders
from manyhands.values.world import World
from manyhands.worker.readers.shared_stream import SharedStream
from manyhands.worker.readers.stream_ring import (
    FoundBatch,
    StreamRing,
    has_ring,
    most_leaves,
)


class OneStream:
    def __init__(
        self, feed: MicroBatchFeed, orders: Orders, line: WorkerChannel, *, own_process: bool
    ) -> None:
        self.feed, self.line, self.worker = feed, line, orders.worker
        self.world = World(0, 1)
        self.shared: SharedStream | None = None
        if own_process and has_ring(orders):
            self.shared = SharedStream(
                StreamRing(orders.state_fd, most_leaves(orders)),
                feed,
                line,
                order=orders.order,
                stuck_s=orders.config.recovery.stuck_s,
                tell=self._tell,
                prove=self._prove,
            )

    def enter(self, world: World, generation: int) -> None:
        self.world = world
        if self.shared is not None:
            self.shared.enter(world.rank, generation)

    def fetch(self, step: Cut, index: int) -> FoundBatch:
        if self.shared is not None:
            found = self.shared.take(step, index)
            if found is not None:
                if step.start == step.epoch == index == 0:
                    self._compare(step, found)
                return found
            if not self.feed.goes_on_with(step, index):
                self.feed.offer_stream_states(self.shared.ring.states())
        if not self.feed.goes_on_with(step, index):
            self._tell_what_was_read(step)
        batch = self.feed.fetch(step, index)
        if self.shared is not None:
            self.shared.learn(batch)
        return FoundBatch(batch, batch_digest(batch))

    def look_back(self, step: Cut, index: int) -> Any:
        """A micro-batch that somebody else has read, if it is still there."""
        if self.shared is None:
            return None
        number = self.feed.batch_number(step)
        found = self.shared.ring.find(number, index, self.shared.known)
        return found.batch if isinstance(found, FoundBatch) else None

    def state(self, step: int) -> list[Any] | None:
        """For a checkpoint, to go on with `step`: the furthest that anybody here knows."""
        number = self.feed.batch_number(self.feed.cut(step))
        states = [self.feed.state_before_batch(number)]
        if self.shared is not None:
            states.append(self.shared.state_before_batch(number))
        return max((s for s in states if s is not None), key=lambda s: s[:2], default=None)

    def resume(self, saved: Any) -> None:
        if saved is not None:
            self.feed.offer_stream_states([saved])
            if self.shared is not None and self.world.leads_host:
                self.shared.put_saved(saved)

    def _tell_what_was_read(self, step: Cut) -> None:
        """Before it is read here, from somewhere on."""
        number = self.feed.batch_number(step)
        before = self.feed.batch_before(number)
        if before == number and self.world.num_ranks == 1:
            return  # the step itself will tell
        cut = self.feed.cut_of_batch(before)
        digests = [batch_digest(self.feed.fetch(cut, index)) for index in range(len(cut.sizes))]
        self._prove(cut, joined_digest(digests))

    def _compare(self, step: Cut, found: FoundBatch) -> None:
        """The very first micro-batch is read here too: a stream may depend on what only one of the
        two processes has (a global variable that the model sets)."""
        digest = batch_digest(self.feed.fetch(step, 0))
        assert self.feed.stream is not None
        self.feed.stream.leave()
        if digest != found.digest:
            raise TaskError(
                "the stream gives other records to the process that reads it for all workers than "
                "to a worker: it depends on something that only one of these processes has, such "
                "as a global variable that is set while the model is built, or on the time. Set it "
                "when the task is loaded, or data.readers = 0."
            )

    def _prove(self, cut: Cut, digest: int) -> None:
        if digest:
            self.line.send(Read(worker=self.worker, step=cut.step, digest=digest))

    def _tell(self, text: str) -> None:
        self.line.send(Notice(worker=self.worker, text=printable(text)))
