# SPDX-License-Identifier: Apache-2.0
"""Waiting for each other through shared memory, without a lock that a dead process could hold.

Each worker owns one sequence word, which only it writes and which only grows. Waiting means: until
every word has reached a number. A waiter sleeps in the kernel (futex) on the word of one laggard,
never longer than NAP_S, and then asks its patience whether to give up: a killed worker can delay
the others by a nap, never for ever.

Who sees a word grow must also see what its owner wrote before. x86 keeps stores and loads in order,
so plain ones will do. Other processors, aarch64 among them, do not, and nothing here puts barriers
around the words; there it is refused, and workers meet over sockets of torch (gloo) instead.
"""

import ctypes
import errno
import os
import platform
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from manyhands.training.collective.collective import Patience
from manyhands.values.errors import Broken, RequestError

NAP_S = 0.02
SPIN_S = 50e-6
STRIDE = 16
"""Words lie 64 bytes apart, so that writing one does not slow down the readers of another."""

T = TypeVar("T")

_SYSCALL = {"x86_64": 202}
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_libc = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


_NAP = _Timespec(0, int(NAP_S * 1e9))


class SequenceWords:
    def __init__(
        self,
        words: NDArray[np.uint32],
        rank: int,
        num_ranks: int,
        *,
        spin: bool,
        patience: Patience,
        watched: bool = False,
    ) -> None:
        """`watched`: another thread of this worker waits for its own word."""
        _refuse_other_processors()
        self.words, self.rank, self.patience = words[::STRIDE], rank, patience
        self.watched = watched
        self.base = words.ctypes.data
        self.sequence = int(self.words[rank])
        self.spin_s = SPIN_S if spin else 0.0
        self.others = [r for r in range(num_ranks) if r != rank]

    def arrive(self) -> None:
        """Everything this worker wrote before is visible to whoever sees the word grow."""
        self.sequence += 1
        self.words[self.rank] = self.sequence
        if self.others or self.watched:
            _wake(self._address(self.rank))

    def reach(self, number: int) -> None:
        """Arrive several times at once: this worker's word grows to `number`."""
        self.sequence = number - 1
        self.arrive()

    def wait(self, ranks: Iterable[int] | None = None) -> None:
        """Until every worker has arrived as often as this one; or those of `ranks` have."""
        for rank in self.others if ranks is None else ranks:
            if self.words[rank] < self.sequence:
                self._wait_for(rank, self.sequence)

    def wait_until(self, number: int) -> None:
        """Until every word, this worker's own too, has grown to `number`."""
        for rank in (self.rank, *self.others):
            if self.words[rank] < number:
                self._wait_for(rank, number)

    def _wait_for(self, rank: int, number: int) -> None:
        started = time.perf_counter()
        while time.perf_counter() - started < self.spin_s:
            if self.words[rank] >= number:
                return
        with self.patience:
            while (seen := int(self.words[rank])) < number:
                if self.patience.broken():
                    raise Broken(f"waiting for rank {rank} was broken off")
                _sleep_on(self._address(rank), seen)

    def _address(self, rank: int) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.base + rank * STRIDE * 4)


class Bells:
    """One word for each worker, on which it sleeps until somebody has done something that may
    concern it. Whoever rings writes first what is to be seen; what a bell says means nothing, only
    that it says something else than before."""

    def __init__(self, words: NDArray[np.uint32], rank: int, patience: Patience) -> None:
        _refuse_other_processors()
        self.words, self.base = words[::STRIDE], words.ctypes.data
        self.rank, self.patience = rank, patience

    def ring(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            # Several may ring at once: two of them never write the same.
            self.words[rank] = (time.perf_counter_ns() << 8 | self.rank) & 0xFFFFFFFF
            _wake(ctypes.c_void_p(self.base + rank * STRIDE * 4))

    def wait(self, look: Callable[[], T | None]) -> T:
        """Until `look` finds something; it is asked again whenever the bell has rung, and after
        every nap."""
        if (found := look()) is not None:
            return found
        address = ctypes.c_void_p(self.base + self.rank * STRIDE * 4)
        with self.patience:
            while True:
                seen = int(self.words[self.rank])
                if (found := look()) is not None:
                    return found
                if self.patience.broken():
                    raise Broken("waiting for the others of this view was broken off")
                _sleep_on(address, seen)


def _refuse_other_processors() -> None:
    if platform.machine() not in _SYSCALL:
        raise RequestError(
            "shared memory between workers is built for x86_64, which keeps stores in order; "
            f"this is {platform.machine()}. Use --set train.collective=gloo (untried there)."
        )


def _wake(address: ctypes.c_void_p) -> None:
    _libc.syscall(_SYSCALL["x86_64"], address, _FUTEX_WAKE, 2**31 - 1, None)


def _sleep_on(address: ctypes.c_void_p, seen: int) -> None:
    """Until somebody wakes who sleeps there, or a nap is over; not if it says something else."""
    result = _libc.syscall(_SYSCALL["x86_64"], address, _FUTEX_WAIT, seen, ctypes.byref(_NAP))
    if result != 0:
        number = ctypes.get_errno()
        if number not in (errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR):
            raise OSError(number, os.strerror(number))
