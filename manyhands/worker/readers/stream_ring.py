# SPDX-License-Identifier: Apache-2.0
"""The memory through which one process of a host gives a stream's micro-batches to all workers.

It lies in the segment that workers of a host inherit, far above the state. There are no locks, so a
dead process holds none: every word has one writer, and nothing depends on when it is seen.

    present   by worker: it is there. With two of them a reader has something to do.
    front     by rank: (view, batch) that it needs. The largest counts: those of earlier views are
              smaller, and within a view nobody is more than a step from the others.
    slots     of three batches, each micro-batch in its own: the batch before the front, which is
              computed again when somebody dies, the front, and the one that is read ahead.
    states    what the stream says of itself, for going on after each of these batches
    saved     the same, of a checkpoint; from the worker that has loaded it

Invariant: who finds a slot's key to be that of a batch, before and after copying it, has what the
reader wrote for that batch. The reader takes the key away, writes, and then gives it. (x86 keeps
stores in order; elsewhere there is no shared memory between workers, and no reader.) There is one
reader at a time: the host agent has seen the last one dead before it forks another.
"""

import mmap
import os
import platform
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from manyhands.data.reading.batch_bytes import PackedBatch, UnknownClass, unpack
from manyhands.data.reading.read_ahead_plan import RING_BATCHES
from manyhands.launch.engines.memory_segments import RESERVED_BYTES
from manyhands.values.machine import birth
from manyhands.values.worker_orders import Orders

RING_AT = 1 << 45
"""In the segment of the state, whose own memory ends before it (build_worker.py sees to that)."""

MOST_PRESENT = 256
MOST_STATE_BYTES = 2 << 20
MOST_SENT_BYTES = 1 << 28
"""A larger micro-batch is left to the workers."""

PAGE = mmap.ALLOCATIONGRANULARITY
_STRIDE = 8
"""Words of a slot: a line of the cache."""
_BATCH_BITS = 40
_CANNOT = -1


class ReaderSigns(NamedTuple):
    """What a reader says of itself."""

    number: int
    """It is the n-th of this run; 0: there was none."""
    pid: int
    signs: int
    """Grows with every record that it reads."""
    longest_us: int
    """Between two of them, so far."""
    at: int
    """The batch that it is at; -1: it is on its way to one."""
    begun: int
    """How often it, or one before it, has begun to read somewhere."""
    unable: bool
    """It has given up; `why`."""
    to_follow: int
    """So many others may come after it; 0: it is the last."""
    began: int
    """When its process did, as the kernel counts: another may get the same number."""


class FoundBatch(NamedTuple):
    batch: Any
    digest: int


class CannotBeSent(NamedTuple):
    """The reader has it, and cannot send it: workers read it themselves."""

    what: str


class WrittenOver:
    """What a slot says cannot be: somebody else has written there."""


def has_ring(orders: Orders) -> bool:
    """Whether one process may read for all workers here: there is a stream, stores are seen in
    order, and the segment has room for all slots."""
    fits = _slots_at(most_leaves(orders)) + _slots_bytes(most_leaves(orders)) <= RESERVED_BYTES
    return orders.stream and platform.machine() == "x86_64" and fits


def most_leaves(orders: Orders) -> int:
    """Micro-batches that a batch may have: a lone last record joins the batch before it."""
    return orders.config.train.micro_batches + 1


class StreamRing:
    def __init__(self, fd: int, leaves: int) -> None:
        """`leaves`: the most micro-batches that a batch has."""
        self.fd, self.leaves = fd, leaves
        count, starts = RING_BATCHES * leaves, _starts()
        self._slots_at = _slots_at(leaves)
        self._head = mmap.mmap(fd, self._slots_at - RING_AT, offset=RING_AT)

        def words(at: int, size: int) -> NDArray[np.int64]:
            return np.frombuffer(self._head, np.int64, size, at)

        self.reader = words(starts[0], 16)
        self._why_at = starts[0] + 1024
        self.present = words(starts[1], MOST_PRESENT)
        self.front = words(starts[2], MOST_PRESENT)
        self._texts = starts[3:-1]
        """Where saved, and then the states of the batches, are."""
        self.slots = words(starts[-1], count * _STRIDE).reshape(count, _STRIDE)
        self._open: dict[int, mmap.mmap] = {}

    # ---- what workers say

    @property
    def crowded(self) -> bool:
        """More than one worker has been here."""
        return int(np.count_nonzero(self.present)) > 1

    def wanted(self) -> int | None:
        """The batch that workers are at."""
        word = int(self.front.max())
        return (word & ((1 << _BATCH_BITS) - 1)) - 1 if word else None

    def want(self, rank: int, generation: int, batch: int) -> None:
        word = generation << _BATCH_BITS | batch + 1
        if word > self.front[rank % MOST_PRESENT]:
            self.front[rank % MOST_PRESENT] = word

    def put_saved(self, generation: int, state: Any) -> None:
        self._put_text(self._texts[0], generation + 1, state)

    def saved(self) -> Any:
        return self._text(self._texts[0], None)

    # ---- what the reader says

    def signs(self) -> ReaderSigns:
        number, pid, signs, longest, at, begun, unable, _, follow, began = self.reader[:10].tolist()
        return ReaderSigns(number, pid, signs, longest, at - 1, begun, bool(unable), follow, began)

    def why(self) -> str:
        length = min(int(self.reader[7]), 1000)
        return self._head[self._why_at : self._why_at + length].decode(errors="replace")

    def begin_reading(self, to_follow: int = 0) -> None:
        """As the one reader; whatever another has left is forgotten, but for states."""
        self.slots[:] = 0
        self.reader[2:5] = 0
        self.reader[6] = 0
        self.reader[8:10] = to_follow, birth(os.getpid()).began
        self.reader[1] = os.getpid()
        self.reader[0] += 1

    def give_up(self, why: str) -> None:
        text = why.encode()[:1000]
        self._head[self._why_at : self._why_at + len(text)] = text
        self.reader[7] = len(text)
        self.reader[6] = 1

    def forget_batches(self) -> None:
        self.slots[:, 0] = 0

    def put(self, batch: int, index: int, packed: PackedBatch, digest: int) -> None:
        k = self._slot(batch, index)
        words = self.slots[k]
        words[0] = 0
        whole = packed.size + len(packed.header)
        buffer = self._buffer(k, whole)
        packed.write(buffer)
        buffer[packed.size : whole] = packed.header
        words[1:4] = packed.size, len(packed.header), digest
        words[0] = batch + 1

    def put_nothing(self, batch: int, index: int, what: str) -> None:
        """It was read, and cannot be sent."""
        text = what.encode()[:PAGE]
        k = self._slot(batch, index)
        words = self.slots[k]
        words[0] = 0
        self._buffer(k, len(text))[: len(text)] = text
        words[1:4] = _CANNOT, len(text), 0
        words[0] = batch + 1

    def put_state(self, batch: int, state: Any) -> None:
        """After all of a batch was read."""
        self._put_text(self._texts[1 + batch % RING_BATCHES], batch + 1, state)

    # ---- what workers find

    def find(
        self, batch: int, index: int, known: dict[str, type]
    ) -> FoundBatch | CannotBeSent | WrittenOver | None:
        """A micro-batch in memory of its own. Raises `UnknownClass`."""
        k = self._slot(batch, index)
        if self.slots[k, 0] != batch + 1:
            return None
        found = self._read(k, known)
        return found if self.slots[k, 0] == batch + 1 else None  # or it was written to meanwhile

    def _read(self, k: int, known: dict[str, type]) -> FoundBatch | CannotBeSent | WrittenOver:
        """What a slot holds; any process of the host may have written there, so nothing is believed
        of sizes."""
        size, header, digest = self.slots[k, 1:4].tolist()
        if size == _CANNOT and 0 <= header <= PAGE:
            what = bytes(self._buffer(k, header)[:header])
            return CannotBeSent(what.decode(errors="replace"))
        if not (0 <= size <= MOST_SENT_BYTES and 0 <= header <= MOST_SENT_BYTES - size):
            return WrittenOver()
        buffer = self._buffer(k, size + header)
        try:
            return FoundBatch(unpack(buffer[size : size + header], buffer, known), digest)
        except UnknownClass:
            raise
        except Exception:
            return WrittenOver()

    def digests(self, batch: int, count: int) -> list[int] | None:
        """Of a whole batch, by micro-batch, if all of it is there."""
        rows = self.slots[[self._slot(batch, index) for index in range(count)], :4]
        return rows[:, 3].tolist() if (rows[:, 0] == batch + 1).all() else None

    def states(self) -> list[Any]:
        """All that there are: of a checkpoint, and of the batches that were read last."""
        found = [self._text(at, None) for at in self._texts]
        return [state for state in found if state is not None]

    def state_after(self, batch: int) -> Any:
        return self._text(self._texts[1 + batch % RING_BATCHES], batch + 1)

    # ---- memory

    def _slot(self, batch: int, index: int) -> int:
        return batch % RING_BATCHES * self.leaves + index

    def _buffer(self, k: int, size: int) -> mmap.mmap:
        """At least `size` bytes of a slot; it is mapped anew when it has to grow."""
        if k not in self._open or len(self._open[k]) < size:
            length = -(-(size + size // 4) // PAGE) * PAGE
            offset = self._slots_at + k * 2 * MOST_SENT_BYTES
            self._open[k] = mmap.mmap(self.fd, max(PAGE, length), offset=offset)
        return self._open[k]

    def _put_text(self, at: int, key: int, value: Any) -> None:
        text = msgspec.json.encode(value)
        if len(text) > MOST_STATE_BYTES:
            text = b"null"
        words = np.frombuffer(self._head, np.int64, 2, at)
        words[0] = 0
        self._head[at + PAGE : at + PAGE + len(text)] = text
        words[1] = len(text)
        words[0] = key

    def _text(self, at: int, key: int | None) -> Any:
        words = np.frombuffer(self._head, np.int64, 2, at)
        before, length = words.tolist()
        if before == 0 or key not in (None, before):
            return None
        text = self._head[at + PAGE : at + PAGE + min(max(0, length), MOST_STATE_BYTES)]
        if int(words[0]) != before:
            return None
        try:
            return msgspec.json.decode(text)
        except msgspec.DecodeError:
            return None


def _starts() -> list[int]:
    """Where the parts before the slots lie: the reader's words, present, front, and the texts."""
    sizes = [PAGE, PAGE, PAGE, *[PAGE + MOST_STATE_BYTES] * (1 + RING_BATCHES)]
    return [sum(sizes[:k]) for k in range(len(sizes) + 1)]


def _slots_at(leaves: int) -> int:
    words_bytes = -(-RING_BATCHES * leaves * _STRIDE * 8 // PAGE) * PAGE
    return RING_AT + _starts()[-1] + words_bytes


def _slots_bytes(leaves: int) -> int:
    return RING_BATCHES * leaves * 2 * MOST_SENT_BYTES
