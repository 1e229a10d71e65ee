# SPDX-License-Identifier: Apache-2.0
"""One worker as a thread of this process."""

import importlib
import os
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from manyhands.launch.engines.fork_agent import WorkerExit, WorkerStarted
from manyhands.launch.engines.launcher import (
    LauncherEvent,
    LauncherTraits,
    ThisHost,
    WorkerPlace,
)
from manyhands.launch.engines.memory_segments import blank


class Inline:
    """One worker, in a thread of this process: for debuggers and for places without fork."""

    def __init__(self, entry: str, fds: tuple[int, int]) -> None:
        module, _, function = entry.partition(":")
        self.entry: Callable[[bytes], int] = getattr(importlib.import_module(module), function)
        self.fds = fds
        self.traits = LauncherTraits(replaceable=False, most_workers=1)
        self.hosts = ThisHost()
        self.signs: queue.SimpleQueue[LauncherEvent] = queue.SimpleQueue()
        self._event = os.eventfd(0, os.EFD_NONBLOCK)
        self._thread: threading.Thread | None = None

    def start(self, worker: int, orders: Callable[[WorkerPlace], bytes], log: Path) -> WorkerPlace:
        assert self._thread is None, "the plan knows most_workers"
        place = WorkerPlace(at="", fds=self.fds)
        self._tell(WorkerStarted(worker, os.getpid()))
        self._thread = threading.Thread(
            target=self._work, args=(worker, orders(place)), name="worker", daemon=True
        )
        self._thread.start()
        return place

    def _work(self, worker: int, orders: bytes) -> None:
        code = 1
        try:
            code = self.entry(orders)
        finally:
            self._tell(WorkerExit(worker, os.getpid(), code))

    def _tell(self, sign: LauncherEvent) -> None:
        self.signs.put(sign)
        os.eventfd_write(self._event, 1)

    def poll(self) -> list[LauncherEvent]:
        with suppress(BlockingIOError):
            os.eventfd_read(self._event)
        signs: list[LauncherEvent] = []
        with suppress(queue.Empty):
            while True:
                signs.append(self.signs.get_nowait())
        return signs

    def fileno(self) -> int:
        return self._event

    def kill(self, worker: int) -> None:
        """A thread cannot be killed; nobody asks, because it is not replaceable."""

    def stop(self) -> None:
        if self._thread is not None:
            self._thread.join(5)
            if self._thread.is_alive():  # it cannot be killed; its memory stays its own
                return
            self._thread = None
        blank(self.fds)

    def close(self) -> None:
        if self._event < 0:
            return
        self.stop()
        if self._thread is None:
            for fd in (self._event, *self.fds):
                os.close(fd)
        self._event = -1
