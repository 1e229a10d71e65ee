# SPDX-License-Identifier: Apache-2.0
"""A worker's readers, as it sees them: what they are asked for, what comes of it, and who takes the
place of one that is gone.

Promise: `take` gives the batch of a micro-batch, or says that the worker is to fetch it itself. It
never waits for a reader that has not begun with it, is gone, or hangs.
"""

import select
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from manyhands.data.reading.batch_bytes import UnknownClass, types_in, unpack
from manyhands.data.reading.read_ahead_plan import (
    LOST_IN_A_ROW,
    SLOTS,
    FetchJob,
    Slot,
    hangs,
    next_moves,
)
from manyhands.launch.engines.nursery import Nursery
from manyhands.values.printable_text import printable
from manyhands.worker.readers.slot_memory import (
    MOST_ANSWER_BYTES,
    BatchMissing,
    BatchWritten,
    FetchOrder,
    FromReader,
    ReaderReady,
    ReaderUnable,
    SlotMemory,
    create_slots,
    decode_answer,
    encode,
)

NAP_S = 0.02
FREE = Slot()
MISSING = object()
"""In place of a batch: the worker fetches it itself."""

USELESS = 3
"""After so many batches that could not be sent, and none that could, readers are of no use."""


@dataclass
class _Reader:
    number: int
    """Of its process; another that takes its place has another."""
    channel: socket.socket
    memory: SlotMemory
    pid: int = 0
    slots: list[Slot] = field(default_factory=lambda: [FREE] * SLOTS)
    asked: list[int] = field(default_factory=lambda: [0] * SLOTS)
    """By slot: the number of its last order."""
    written: list[BatchWritten | None] = field(default_factory=lambda: [None] * SLOTS)
    heard: float = 0.0
    """When it last answered, or was asked while it had nothing to do."""

    @property
    def busy(self) -> bool:
        return any(slot.state in ("asked", "dropped") for slot in self.slots)

    def silent_s(self) -> float:
        return time.monotonic() - self.heard if self.busy else 0.0

    def close(self) -> None:
        self.channel.close()
        self.memory.close()


class ReadingCrew:
    def __init__(
        self,
        nursery: Nursery,
        count: int,
        *,
        stuck_s: float,
        tell: Callable[[str], None],
        still_wanted: Callable[[], object],
    ) -> None:
        """`still_wanted` is called while a reader is waited for, and raises if there is no need."""
        self.nursery, self.stuck_s = nursery, stuck_s
        self.tell, self.still_wanted = tell, still_wanted
        self.known: dict[str, type] = {}
        """Classes that batches of this worker have had."""
        self.own: set[FetchJob] = set()
        """What a reader has died of, perhaps: the worker fetches it."""
        self.usual_s: float | None = None
        self.taken = self.unsent = self.lost_in_a_row = 0
        self.gave = 0
        """The number of the reader whose batch was taken last."""
        self._orders = self._forked = 0
        self._told: set[str] = set()
        self.readers = [self._new_reader() for _ in range(count)]

    @property
    def room(self) -> int:
        """How many micro-batches they can hold."""
        return SLOTS * len(self.readers)

    # ---- what the feed asks

    def want(self, jobs: Sequence[FetchJob]) -> None:
        """These are needed next, in this order; the first of them at once."""
        self._listen(0.0)
        for reader in list(self.readers):
            if reader.pid:
                self._replace_if_it_hangs(reader)
        if not self.readers:
            return
        held = {slot.job for reader in self.readers for slot in reader.slots}
        own = frozenset(self.own) | frozenset(job for job in jobs[:1] if job not in held)
        moves = next_moves(jobs, [reader.slots for reader in self.readers], own)
        for r, k in moves.drop:
            self._drop(self.readers[r], k)
        for r, k, job in moves.ask:
            self._ask(self.readers[r], k, job)
        self.own &= set(jobs)

    def take(self, job: FetchJob) -> Any:
        """The batch, or MISSING."""
        self._listen(0.0)
        found = self._find(job)
        while found is not None:
            reader, k = found
            if reader.slots[k].state == "ready":
                return self._open(reader, k)
            if reader.memory.begun < reader.asked[k]:  # it is at something else
                self._drop(reader, k)
                return MISSING
            if self._replace_if_it_hangs(reader):
                return MISSING
            self.still_wanted()
            self._listen(NAP_S)
            found = self._find(job)
        return MISSING

    def learn(self, batch: Any, seconds: float) -> None:
        """From a batch that the worker has fetched itself: which classes there are."""
        if self.usual_s is None:
            self.usual_s = seconds
        if self.readers:
            self.known.update(types_in(batch))

    def dismiss(self, why: str) -> None:
        """The worker goes on without them."""
        self._give_up(why)

    def close(self) -> None:
        for reader in self.readers:
            reader.close()
        self.readers.clear()

    # ---- orders and answers

    def _ask(self, reader: _Reader, k: int, job: FetchJob) -> None:
        self._orders += 1
        if not reader.busy:
            reader.heard = time.monotonic()
        reader.slots[k], reader.asked[k] = Slot("asked", job), self._orders
        order = FetchOrder(self._orders, k, job.step, job.index)
        try:
            reader.channel.send(encode(order), socket.MSG_DONTWAIT)
        except OSError:  # it is gone, which is seen elsewhere
            reader.slots[k] = FREE

    def _drop(self, reader: _Reader, k: int) -> None:
        if reader.slots[k].state == "ready":
            reader.slots[k] = FREE
        else:
            reader.slots[k] = Slot("dropped")
            reader.memory.drop(k, reader.asked[k])

    def _find(self, job: FetchJob) -> tuple[_Reader, int] | None:
        for reader in self.readers:
            for k, slot in enumerate(reader.slots):
                if slot.job == job:
                    return reader, k
        return None

    def _open(self, reader: _Reader, k: int) -> Any:
        """What lies in a slot, copied: the slot is free then."""
        written, reader.slots[k] = reader.written[k], FREE
        assert written is not None
        buffer = reader.memory.slot(k, written.size + written.header)
        header = buffer[written.size : written.size + written.header]
        try:
            batch = unpack(header, buffer, self.known)
        except UnknownClass as error:
            self._cannot_be_sent(f"an object of class {error}", count=str(error) in self._told)
            self._told.add(str(error))  # which is learned now
            return MISSING
        self.taken += 1
        self.gave = reader.number
        return batch

    def _listen(self, seconds: float) -> None:
        """Take note of what readers have answered, and of who is gone."""
        poll = select.poll()
        by_fd = {reader.channel.fileno(): reader for reader in self.readers}
        for fd in (*by_fd, self.nursery.channel.fileno()):
            poll.register(fd, select.POLLIN)
        for fd, _ in poll.poll(seconds * 1000):
            if fd in by_fd and by_fd[fd] in self.readers:
                self._hear(by_fd[fd])
        for end in self.nursery.ended():
            for reader in list(self.readers):
                if reader.number == end.number:
                    self._replace(reader, _how(end.code))
        if not self.nursery.alive and self.readers:
            self._give_up("the process that starts readers is gone")

    def _hear(self, reader: _Reader) -> None:
        while True:
            try:
                data = reader.channel.recv(MOST_ANSWER_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                return  # the nursery tells how it ended
            reader.heard = time.monotonic()
            self._note(reader, decode_answer(data))
            if reader not in self.readers:
                return

    def _note(self, reader: _Reader, answer: FromReader) -> None:
        match answer:
            case ReaderReady(pid):
                reader.pid = pid
            case ReaderUnable(why):
                self._give_up(f"a reader could not open the data ({printable(why, 300)})")
            case BatchWritten(number, k, seconds=seconds):
                self.lost_in_a_row = 0
                before = seconds if self.usual_s is None else self.usual_s
                self.usual_s = 0.8 * before + 0.2 * seconds
                wanted = reader.slots[k].state == "asked" and reader.asked[k] == number
                reader.slots[k] = Slot("ready", reader.slots[k].job) if wanted else FREE
                reader.written[k] = answer
            case BatchMissing(number, k, why):
                job = reader.slots[k].job
                reader.slots[k] = FREE
                if job is not None and reader.asked[k] == number:
                    self.own.add(job)
                if why:
                    self._cannot_be_sent(why, count=True)

    # ---- who is gone

    def _new_reader(self) -> _Reader:
        self._forked += 1
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fd = create_slots(SLOTS)
        with theirs:
            self.nursery.fork(self._forked, [theirs.fileno(), fd])
        return _Reader(self._forked, ours, SlotMemory(fd, SLOTS))

    def _replace_if_it_hangs(self, reader: _Reader) -> bool:
        if gone := hangs(reader.silent_s(), self.usual_s, self.stuck_s):
            self._replace(reader, "took too long, and was ended")
        return gone

    def _replace(self, reader: _Reader, how: str) -> None:
        """Another takes its place, with memory of its own. What it had begun the worker fetches:
        it may have died of it, and then it is the worker's to tell of."""
        at = reader.memory.begun
        for slot, number in zip(reader.slots, reader.asked, strict=True):
            if slot.state == "asked" and number == at and slot.job is not None:
                self.own.add(slot.job)
        self.nursery.end(reader.number)
        reader.close()
        self.lost_in_a_row += 1
        here = self.readers.index(reader)
        if self.lost_in_a_row > LOST_IN_A_ROW:
            self.readers.pop(here)
            self._give_up(f"readers are lost one after the other, the last one {how}")
            return
        who = f"a reader (process {reader.pid})" if reader.pid else "a reader that had just begun"
        self._say(f"{who} {how}; another takes its place")
        self.readers[here] = self._new_reader()

    def _cannot_be_sent(self, what: str, *, count: bool) -> None:
        self.unsent += count
        if not count:
            return
        instead = "the worker fetches such batches itself"
        self._say(f"a reader cannot send {printable(what, 300)} as data; {instead}")
        if self.unsent >= USELESS and self.taken == 0:
            self._give_up("what they fetch cannot be sent")

    def _give_up(self, why: str) -> None:
        """Without readers the run is as right as with them, and perhaps slower."""
        for reader in self.readers:
            self.nursery.end(reader.number)
        self.close()
        self._say(f"this worker has no readers any more, and fetches its own: {why}")

    def _say(self, text: str) -> None:
        if text not in self._told and len(self._told) < 20:
            self._told.add(text)
            self.tell(text)


def _how(code: int) -> str:
    if code >= 0:
        return "ended by itself"
    try:
        return f"was killed by signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"was killed by signal {-code}"
