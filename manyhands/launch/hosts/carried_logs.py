# SPDX-License-Identifier: Apache-2.0
"""Logs of workers whose host does not see the run's folder: sent to the driver as they grow.

Of each worker the newest KEPT_BYTES to twice that are on the driver's disk, in `worker-03.log` and,
of what was before that, `worker-03.log.before`; so however much is printed, or said to be, it takes
no more room. A host sends no faster than the driver takes it, and leaves out what would not be kept
anyway. The news of a worker's end waits up to LAST_WORDS_S for what it wrote, and in any case goes
after the last LAST_BYTES of that.
"""

import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from manyhands.launch.engines.fork_agent import WorkerExit
from manyhands.launch.hosts.join_protocol import Logged
from manyhands.launch.wire.bulk_window import BulkWindow

KEPT_BYTES = 8 << 20
LAST_BYTES = 256 << 10
LAST_WORDS_S = 1.0
ANSWER_S = 5.0
"""What was not said to be taken for so long was lost, or what said so was."""
PIECE_BYTES = 64 << 10


def next_stretch(sent: int, size: int, *, last: bool) -> tuple[int, int]:
    """What of a log to send next, as (start, stop): of `size` bytes so many were sent."""
    start = max(sent, size - (LAST_BYTES if last else 2 * KEPT_BYTES))
    return start, max(start, size if last else min(size, start + PIECE_BYTES))


class LogsToSend:
    """A host's half."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[Path, int]] = {}
        """worker → its log, and how much of it was sent"""
        self._ends: dict[int, tuple[WorkerExit, float]] = {}
        """Of workers that have ended: the news of it, and how long that waits for their logs"""
        self._window = BulkWindow()

    def begin(self, worker: int, path: Path) -> None:
        self._of[worker] = path, 0

    def clear(self) -> None:
        self._of.clear()
        self._ends.clear()

    def taken(self) -> None:
        """The driver has written a piece down."""
        self._window.came(time.monotonic())

    def more(self) -> Iterator[Logged]:
        """As much as can be sent now, of all in turn. What is not taken from here was not sent."""
        self._window.give_up(time.monotonic() - ANSWER_S)
        waiting = deque(self._of)
        while waiting and self._window.open:
            worker = waiting.popleft()
            for piece in self._pieces(worker, last=False):
                yield piece
                self._of[worker] = self._of.pop(worker)  # the others are first, the next time
                waiting.append(worker)

    def end(self, news: WorkerExit) -> None:
        """A worker has ended; of that the driver hears after what it wrote."""
        self._ends[news.worker] = news, time.monotonic() + LAST_WORDS_S

    def ends(self, *, at_once: bool = False) -> Iterator[Logged | WorkerExit]:
        """The last of what workers wrote that have ended, and that they have: when all before it
        was sent, or has had its time."""
        for worker, (news, until) in list(self._ends.items()):
            if not (at_once or time.monotonic() > until) and self._unsent(worker) > LAST_BYTES:
                continue
            yield from self._pieces(worker, last=True)
            yield news
            del self._ends[worker]
            self._of.pop(worker, None)

    def _unsent(self, worker: int) -> int:
        path, sent = self._of.get(worker, (Path(), 0))
        try:
            return path.stat().st_size - sent if worker in self._of else 0
        except OSError:
            return 0

    def _pieces(self, worker: int, *, last: bool) -> Iterator[Logged]:
        """The next one, or the last ones; each is noted as sent when one asks for the next."""
        if worker not in self._of:
            return
        path, sent = self._of[worker]
        try:
            with path.open("rb") as file:
                start, stop = next_stretch(sent, os.fstat(file.fileno()).st_size, last=last)
                data = os.pread(file.fileno(), stop - start, start)
        except OSError:
            return
        left_out = f"\n({start - sent:,} bytes were left out here)\n" if start > sent else ""
        for at in range(0, len(data), PIECE_BYTES):
            piece = data[at : at + PIECE_BYTES]
            yield Logged(worker, (b"" if at else left_out.encode()) + piece)
            self._of[worker] = path, start + at + len(piece)
            self._window.asked(time.monotonic())


class CarriedLogs:
    """The driver's half."""

    def __init__(self) -> None:
        self._of: dict[int, Path] = {}
        self._sizes: dict[int, int] = {}
        self._cut: set[int] = set()

    def begin(self, worker: int, path: Path) -> None:
        self._of[worker], self._sizes[worker] = path, 0

    def clear(self) -> None:
        self._of.clear()
        self._sizes.clear()
        self._cut.clear()

    def add(self, worker: int, data: bytes) -> str | None:
        """What a person should know, once: that some is not kept. A log is no reason to fail."""
        if worker not in self._of:
            return None
        path, news = self._of[worker], None
        with suppress(OSError):
            if self._sizes[worker] + len(data) > KEPT_BYTES and self._sizes[worker]:
                before = path.with_name(f"{path.name}.before")
                path.replace(before)
                path.write_text(f"(What came before is in {before.name}; older than that: gone.)\n")
                self._sizes[worker] = 0
                if worker not in self._cut:
                    self._cut.add(worker)
                    megabytes = KEPT_BYTES >> 20
                    news = f"only the newest {megabytes} to {2 * megabytes} MB of it are kept"
            with path.open("ab") as file:
                file.write(data[-KEPT_BYTES:])
            self._sizes[worker] += len(data)
        return news and f"worker {worker} prints much to its log ({path}): {news}"
