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

import numpy as np
from numpy.typing import NDArray

from manyhands.training.collective.collective import Patience
from manyhands.values.errors import Broken, RequestError

NAP_S = 0.02
SPIN_S = 50e-6
STRIDE = 16
"""Words lie 64 bytes apart, so that writing one does not slow down the readers of another."""

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
        if platform.machine() not in _SYSCALL:
            raise RequestError(
                "shared memory between workers is built for x86_64, which keeps stores in order; "
                f"this is {platform.machine()}. Use --set train.collective=gloo (untried there)."
            )
        self.words, self.rank, self.patience = words[::STRIDE], rank, patience
        self.watched = watched
        self.base = words.ctypes.data
        self.sequence = int(self.words[rank])
        self.spin_s = SPIN_S if spin else 0.0
        self.others = [r for r in range(num_ranks) if r != rank]
        self._futex = _libc.syscall
        self._number = _SYSCALL[platform.machine()]

    def arrive(self) -> None:
        """Everything this worker wrote before is visible to whoever sees the word grow."""
        self.sequence += 1
        self.words[self.rank] = self.sequence
        if self.others or self.watched:
            self._futex(self._number, self._address(self.rank), _FUTEX_WAKE, 2**31 - 1, None)

    def reach(self, number: int) -> None:
        """Arrive several times at once: this worker's word grows to `number`."""
        self.sequence = number - 1
        self.arrive()

    def wait(self) -> None:
        """Until every worker has arrived as often as this one."""
        for rank in self.others:
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
                self._sleep_on(rank, seen)

    def _sleep_on(self, rank: int, seen: int) -> None:
        result = self._futex(
            self._number, self._address(rank), _FUTEX_WAIT, seen, ctypes.byref(_NAP)
        )
        if result != 0:
            number = ctypes.get_errno()
            if number not in (errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR):
                raise OSError(number, os.strerror(number))

    def _address(self, rank: int) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.base + rank * STRIDE * 4)
