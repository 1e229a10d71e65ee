# SPDX-License-Identifier: Apache-2.0
"""A stream that one process of a host reads for all its workers, as one of the workers sees it.

Promise: `take` gives a micro-batch with its digest, or says that the worker is to read it itself.
It waits for a reader that lives and gets on, and for no other: not for one that never came, is
gone, hangs, or has to read much to get here while this worker is there already.
"""

import os
import select
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from manyhands.accounting.deal_micro_batches import Cut
from manyhands.accounting.read_digests import joined_digest
from manyhands.data.reading.batch_bytes import UnknownClass, types_in
from manyhands.data.reading.micro_batch_feed import MicroBatchFeed
from manyhands.data.reading.read_ahead_plan import hangs
from manyhands.launch.wire.control_channel import WorkerChannel
from manyhands.values.machine import Birth, birth
from manyhands.values.printable_text import printable
from manyhands.worker.readers.stream_ring import (
    MOST_PRESENT,
    CannotBeSent,
    FoundBatch,
    ReaderSigns,
    StreamRing,
    WrittenOver,
)

NAP_S, LONG_NAP_S = 0.0002, 0.005

REPLACED_S = 1.0
"""So long another reader is waited for, after one is gone."""

Prove = Callable[[Cut, int], object]
"""Is told what was read for a step, by whoever has begun to read anew."""


class SharedStream:
    def __init__(
        self,
        ring: StreamRing,
        feed: MicroBatchFeed,
        line: WorkerChannel,
        *,
        order: int,
        stuck_s: float,
        tell: Callable[[str], object],
        prove: Prove,
    ) -> None:
        """`order`: this worker is the n-th of its run."""
        self.ring, self.feed, self.line, self.stuck_s = ring, feed, line, stuck_s
        self.tell, self.prove = tell, prove
        self.known: dict[str, type] = {}
        """Classes that batches of this worker have had."""
        self.waited_s = 0.0
        """For the reader, when a micro-batch was taken last."""
        self.rank = self.generation = 0
        self._watch = ReaderWatch()
        self._proven = self._owed = -1
        self._told: set[str] = set()
        ring.present[order % MOST_PRESENT] = 1

    def enter(self, rank: int, generation: int) -> None:
        """A place in a view."""
        self.rank, self.generation = rank, generation

    def put_saved(self, state: Any) -> None:
        """What a checkpoint says of the stream: the reader may begin there."""
        if state is not None:
            self.ring.put_saved(self.generation, state)

    def state_before_batch(self, number: int) -> Any:
        return self.ring.state_after(number - 1) if number > 0 else None

    def learn(self, batch: Any) -> None:
        """From a batch that this worker has read itself."""
        self.known.update(types_in(batch))

    def take(self, step: Cut, index: int) -> FoundBatch | None:
        """None: to be read here."""
        self.waited_s = 0.0
        if not self.ring.crowded:
            return None
        batch = self.feed.batch_number(step)
        self.ring.want(self.rank, self.generation, batch)
        began = time.monotonic()
        self._watch.wait(began)
        found = self._when_there(step, index, batch)
        self.waited_s = time.monotonic() - began
        return found

    def _when_there(self, step: Cut, index: int, batch: int) -> FoundBatch | None:
        nap = NAP_S
        while True:
            try:
                found = self.ring.find(batch, index, self.known)
            except UnknownClass:  # it is learned when the batch is read here
                return None
            if isinstance(found, CannotBeSent):
                what = printable(found.what, 300)
                self._say(f"the stream's reader cannot send {what} as data; workers read it")
                return None
            if isinstance(found, WrittenOver):
                self._say(
                    "what the stream's reader left in memory was written over; workers read it"
                )
                return None
            if found is not None:
                self._tell_what_was_read(batch)
                return found
            if not self._worth_waiting(step, index, batch):
                return None
            self.line.stop_if_broken()
            time.sleep(nap)
            nap = min(1.5 * nap, LONG_NAP_S)

    def close(self) -> None:
        self._watch.close()

    def _worth_waiting(self, step: Cut, index: int, batch: int) -> bool:
        signs, now = self.ring.signs(), time.monotonic()
        if signs.pid == 0:  # it is not there, or not yet
            return False
        if signs.unable:
            self._say(f"each worker reads the stream itself: {printable(self.ring.why(), 300)}")
            return False
        watch = self._watch
        if watch.look(signs, now):
            self.line.heartbeat.progress += 1
        who = f"the process that reads the stream for all workers here ({signs.pid})"
        here = self.feed.goes_on_with(step, index)
        until = "until another is there, each worker reads it"
        if signs.to_follow == 0:
            until = "there will be no other, so from now on each worker reads it"
        if watch.gone_since is not None:
            self._say(f"{who} is gone; {until}")
            return not here and signs.to_follow > 0 and now - watch.gone_since < REPLACED_S
        usual = signs.longest_us / 1e6 if signs.longest_us else None
        if hangs(now - watch.heard, usual, self.stuck_s):
            watch.end()
            self._say(f"{who} took too long, and was ended; {until}")
            return False
        near = signs.at >= 0 and batch <= signs.at + 1
        return near or not here

    def _tell_what_was_read(self, batch: int) -> None:
        """Whenever the reader has begun anew: of the batch before, or, if there is none, of this
        one when it is whole."""
        begun = self.ring.signs().begun
        if begun != self._proven:
            self._proven, self._owed = begun, self.feed.batch_before(batch)
        if self._owed < 0 or batch < self._owed:
            return
        cut = self.feed.cut_of_batch(self._owed)
        digests = self.ring.digests(self._owed, len(cut.sizes))
        if digests is not None:
            self.prove(cut, joined_digest(digests))
        if digests is not None or batch > self._owed:
            self._owed = -1

    def _say(self, text: str) -> None:
        if text not in self._told and len(self._told) < 20:
            self._told.add(text)
            self.tell(text)


class ReaderWatch:
    """Whether the reader lives, and gets on."""

    def __init__(self) -> None:
        self._number, self._signs, self._fd = 0, -1, -1
        self.heard = 0.0
        self.gone_since: float | None = None

    def wait(self, now: float) -> None:
        """Somebody begins to wait for it: until now it had nothing to do, perhaps."""
        self.heard = now

    def look(self, signs: ReaderSigns, now: float) -> bool:
        """Whether it has got on since it was looked at last."""
        if signs.number != self._number:
            self.close()
            self._number, self._signs, self.heard, self.gone_since = signs.number, -1, now, None
            self._open(signs)
        if self.gone_since is None and (self._fd < 0 or select.select([self._fd], [], [], 0)[0]):
            self.gone_since = now
        if signs.signs == self._signs:
            return False
        self._signs, self.heard = signs.signs, now
        return True

    def _open(self, signs: ReaderSigns) -> None:
        """The reader's process, and no other that got its number after it: that must not be killed.
        What is looked at after it was opened is what was opened, or is gone, as is then seen."""
        with suppress(OSError, ValueError, OverflowError):  # no such process: it is gone
            self._fd = os.pidfd_open(signs.pid)
            if birth(signs.pid) != Birth(os.getppid(), signs.began):  # of the host agent, as we are
                self.close()

    def end(self) -> None:
        with suppress(OSError):
            signal.pidfd_send_signal(self._fd, signal.SIGKILL)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
