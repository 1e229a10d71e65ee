# SPDX-License-Identifier: Apache-2.0
"""The memory between a worker and one of its readers, and what they say to each other.

There are no locks, so a dead process holds none. Every order has a number that only grows, and a
slot. The reader writes the slot and then answers with the number, through a socket, so whoever has
the answer sees what was written; an answer to an order that is not wanted any more is known by its
number. Two kinds of sequence words lie beside the slots, each written by one side only: which order
the reader has begun, and up to which a slot's orders were dropped. They save time, and nothing
depends on when they are seen.

A reader that is replaced takes its memory with it: who was killed while it wrote, or wakes up late,
writes where nobody looks.
"""

import mmap
import os

import msgspec
import numpy as np

PAGE = mmap.ALLOCATIONGRANULARITY
RESERVED_SLOT_BYTES = 1 << 38
"""Sparse: only pages that are written to take memory."""

MOST_BATCH_BYTES = 1 << 28
"""A larger batch is left to the worker, so that what lies ready has a bound."""

_WORDS = PAGE // 8


class FetchOrder(msgspec.Struct, frozen=True, tag=True):
    number: int
    slot: int
    step: int
    index: int


class ReaderReady(msgspec.Struct, frozen=True, tag=True):
    pid: int


class ReaderUnable(msgspec.Struct, frozen=True, tag=True):
    """It could not even open the data; the worker's own error tells why."""

    why: str


class BatchWritten(msgspec.Struct, frozen=True, tag=True):
    number: int
    slot: int
    size: int
    header: int
    """Bytes of it, after `size`."""
    seconds: float


class BatchMissing(msgspec.Struct, frozen=True, tag=True):
    """The worker fetches it itself. `why` is set when that is for want of a way to send it."""

    number: int
    slot: int
    why: str = ""


FromReader = ReaderReady | ReaderUnable | BatchWritten | BatchMissing

encode = msgspec.msgpack.Encoder().encode
decode_order = msgspec.msgpack.Decoder(FetchOrder).decode
decode_answer = msgspec.msgpack.Decoder(FromReader).decode

MOST_ANSWER_BYTES = 1 << 16


def create_slots(slots: int) -> int:
    """A memfd: it has no name in the file system and vanishes with its last holder."""
    fd = os.memfd_create("manyhands-reader")
    os.ftruncate(fd, PAGE + slots * RESERVED_SLOT_BYTES)
    return fd


class SlotMemory:
    """One end of it."""

    def __init__(self, fd: int, slots: int) -> None:
        assert slots < _WORDS
        self.fd = fd
        self._first = mmap.mmap(fd, PAGE)
        words = np.frombuffer(self._first, np.int64)
        self._begun, self._dropped = words[:1], words[1 : 1 + slots]
        self._open: dict[int, mmap.mmap] = {}

    @property
    def begun(self) -> int:
        """The order that the reader has begun last."""
        return int(self._begun[0])

    @begun.setter
    def begun(self, number: int) -> None:
        self._begun[0] = number

    def drop(self, slot: int, number: int) -> None:
        self._dropped[slot] = number

    def is_dropped(self, slot: int, number: int) -> bool:
        return int(self._dropped[slot]) >= number

    def slot(self, k: int, size: int) -> mmap.mmap:
        """At least `size` bytes of a slot; it is mapped anew when it has to grow."""
        if k not in self._open or len(self._open[k]) < size:
            length = -(-(size + size // 4) // PAGE) * PAGE
            offset = PAGE + k * RESERVED_SLOT_BYTES
            self._open[k] = mmap.mmap(self.fd, max(PAGE, length), offset=offset)
        return self._open[k]

    def close(self) -> None:
        """Mappings go with the last tensor that lies in them."""
        os.close(self.fd)
        self._open.clear()
