# SPDX-License-Identifier: Apache-2.0
"""A pool of processes that never outlives its driver and never runs the user's script.

`ProcessPoolExecutor` with three repairs. Its workers wait for ever when the driver is killed: ours
watch a pipe that only the driver holds open, and end with it; closing the pipe is also how they are
ended in a hurry. Spawned workers import the driver's `__main__`, which runs a script that has no
`if __name__ == "__main__"`: ours do not, because what they are sent travels by value. And Ctrl-C
is the driver's to answer, not theirs.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, TypeVar

T = TypeVar("T")

_one_at_a_time = threading.Lock()


class Pool:
    def __init__(self, workers: int) -> None:
        # A fork would copy locks that the driver's threads (Arrow's, torch's) hold at that moment.
        context = get_context("spawn")
        self._theirs, self._ours = context.Pipe(duplex=False)
        self._executor = ProcessPoolExecutor(
            workers, mp_context=context, initializer=_begin, initargs=(self._theirs,)
        )

    def submit(self, call: Callable[..., T], *args: Any) -> Future[T]:
        with _quiet_start():  # processes are started by submit, when all others are busy
            return self._executor.submit(call, *args)

    def close(self, *, hurry: bool = False) -> None:
        """The processes are gone when it returns; in a hurry, in the middle of what they did."""
        if hurry:
            self._ours.close()
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._ours.close()
        self._theirs.close()


def _begin(driver: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_end_with, args=(driver,), daemon=True).start()


def _end_with(driver: Connection) -> None:
    driver.poll(None)  # nothing is ever sent: this returns when the other end is closed
    os._exit(1)


@contextmanager
def _quiet_start() -> Generator[None]:
    """Start processes that know nothing of `__main__`, and that Ctrl-C does not reach."""
    main = sys.modules["__main__"]
    with _one_at_a_time:
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        found = {
            name: main.__dict__[name] for name in ("__file__", "__spec__") if name in vars(main)
        }
        try:
            main.__dict__.update(dict.fromkeys(found))
            yield
        finally:
            main.__dict__.update(found)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
