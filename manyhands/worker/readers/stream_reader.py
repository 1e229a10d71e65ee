# SPDX-License-Identifier: Apache-2.0
"""The life of the process that reads a stream for all workers of its host.

The host agent forks it beside the first worker, and again if it is killed; it ends with the last.
While there is one worker it sleeps: that one reads for itself. It reads in order, as a worker would
(the same code, seeds, threads and kernels), up to one batch ahead of the batch that workers are at;
they tell in memory (stream_ring.py). Where they go back, so does it: to the nearest state that the
stream told of itself, or to the beginning.

Invariant: it only saves work. What goes wrong here is not told in words: workers read for
themselves then, and an error of the user's code is theirs, with the records and the line.
"""

import time
from collections.abc import Callable
from contextlib import suppress

from manyhands.accounting.deal_micro_batches import Cut
from manyhands.data.reading.batch_bytes import NotData, PackedBatch
from manyhands.data.reading.batch_digest import batch_digest
from manyhands.data.reading.micro_batch_feed import MicroBatchFeed
from manyhands.data.reading.read_ahead_plan import RING_BATCHES, next_batch
from manyhands.values.byte_sizes import shown_bytes
from manyhands.values.user_frames import named
from manyhands.values.worker_orders import Orders
from manyhands.worker.readers.reader_process import open_as_worker
from manyhands.worker.readers.stream_ring import MOST_SENT_BYTES, StreamRing, most_leaves

NAP_S = 0.0005
LONG_NAP_S = 0.02

USELESS = 3
"""After so many micro-batches that could not be sent, and none that could, it is of no use."""


def read_stream(orders: Orders, to_follow: int) -> None:
    """In a process of its own, until it is killed or of no use. So many more may follow it."""
    ring = StreamRing(orders.state_fd, most_leaves(orders))
    ring.begin_reading(to_follow)
    with suppress(ReaderOfNoUse):
        while not ring.crowded:
            time.sleep(LONG_NAP_S)
        try:
            feed = open_as_worker(orders)
        except BaseException as error:
            ring.give_up(f"it could not open the data ({named(error)})")
            return
        reading = StreamReading(feed, ring, orders.steps)
        nap = NAP_S
        while True:
            if reading.turn():
                nap = NAP_S
            else:
                time.sleep(nap)
                nap = min(2 * nap, LONG_NAP_S)


class ReaderOfNoUse(Exception):
    """It has told why."""


class StreamReading:
    """What the ring holds, and what is read next."""

    def __init__(
        self,
        feed: MicroBatchFeed,
        ring: StreamRing,
        steps: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.feed, self.ring, self.clock = feed, ring, clock
        self.last_batch = feed.batch_number(feed.cut(steps - 1))
        self.held, self.index = range(0), 0
        """Batches that are whole in the ring, and how much of the next one is there."""
        self.sent = self.unsent = 0
        self._sign_at = clock()
        # What was passed is in the ring; but the state before a batch is told when it is through.
        feed.keep = feed.batch
        feed.watch_stream(self._sign, every=1)

    def turn(self) -> bool:
        """Read one micro-batch, if one is wanted."""
        wanted = self.ring.wanted()
        if wanted is None:
            return False
        batch = next_batch(wanted, self.feed.batch_before(wanted), self.held)
        if batch is None or batch > self.last_batch:
            return False
        if batch != self.held.stop or not self.ring.reader[4]:
            self._begin(batch)
        cut = self.feed.cut_of_batch(batch)
        self._sign_at = self.clock()
        if self.index == 0:  # it takes the place of an earlier one
            self.held = range(max(self.held.start, batch - RING_BATCHES + 1), batch)
        self._read(cut, batch)
        self.ring.reader[4] = batch + 1
        self.index += 1
        if self.index == len(cut.sizes):
            self.ring.put_state(batch, self.feed.state_before_batch(batch + 1))
            self.held, self.index = range(self.held.start, batch + 1), 0
        return True

    def _begin(self, batch: int) -> None:
        """Somewhere else."""
        self.ring.reader[4] = 0
        self.ring.forget_batches()
        self.ring.reader[5] += 1
        self.feed.offer_stream_states(self.ring.states())
        self.held, self.index = range(batch, batch), 0

    def _read(self, cut: Cut, batch: int) -> None:
        try:
            values = self.feed.fetch(cut, self.index)
        except BaseException as error:  # the generator has ended: what it gives now is not right
            self.ring.give_up(f"reading failed here ({named(error)})")
            raise ReaderOfNoUse from error
        try:
            packed = PackedBatch(values)
            whole = packed.size + len(packed.header)
            if whole > MOST_SENT_BYTES:
                most = shown_bytes(MOST_SENT_BYTES)
                raise NotData(f"{shown_bytes(whole)} in one micro-batch ({most} at the most)")
            self.ring.put(batch, self.index, packed, batch_digest(values))
            self.sent += 1
        except Exception as error:
            why = str(error) if isinstance(error, NotData) else named(error)
            self.ring.put_nothing(batch, self.index, why)
            self.unsent += 1
            if self.unsent >= USELESS and self.sent == 0:
                self.ring.give_up(f"what it reads cannot be sent as data: {why}")
                raise ReaderOfNoUse from error
        self._sign()

    def _sign(self) -> None:
        """Of life: after every record."""
        now, words = self.clock(), self.ring.reader
        words[3] = max(int(words[3]), round(1e6 * (now - self._sign_at)))
        words[2] += 1
        self._sign_at = now
