# SPDX-License-Identifier: Apache-2.0
"""Logs of workers whose host does not see the run's folder: sent to the driver as they grow.

Of each worker the newest KEPT_BYTES to twice that are on the driver's disk, in `worker-03.log` and,
of what was before that, `worker-03.log.before`; so however much is printed, or said to be, it takes
no more room. A host sends no faster than the driver takes it, and leaves out what would not be kept
anyway; when a worker ends, the last LAST_BYTES of it go before the news of its end.
"""

import os
import time
from contextlib import suppress
from pathlib import Path

from manyhands.launch.hosts.join_protocol import Logged
from manyhands.launch.wire.bulk_window import BulkWindow

KEPT_BYTES = 8 << 20
LAST_BYTES = 256 << 10
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
        self._window = BulkWindow()

    def begin(self, worker: int, path: Path) -> None:
        self._of[worker] = path, 0

    def clear(self) -> None:
        self._of.clear()

    def taken(self) -> None:
        """The driver has written a piece down."""
        self._window.came(time.monotonic())

    def more(self) -> list[Logged]:
        """As much as can be sent now."""
        found: list[Logged] = []
        for worker in list(self._of):
            while self._window.open and (piece := self._read(worker, last=False)):
                self._window.asked(time.monotonic())
                found.append(Logged(worker, piece))
        return found

    def rest(self, worker: int) -> list[Logged]:
        """It has ended: the end of what it wrote, at once."""
        if worker not in self._of:
            return []
        data = self._read(worker, last=True)
        del self._of[worker]
        pieces = [data[at : at + PIECE_BYTES] for at in range(0, len(data), PIECE_BYTES)]
        for _ in pieces:
            self._window.asked(time.monotonic())
        return [Logged(worker, piece) for piece in pieces]

    def _read(self, worker: int, *, last: bool) -> bytes:
        path, sent = self._of[worker]
        try:
            with path.open("rb") as file:
                start, stop = next_stretch(sent, os.fstat(file.fileno()).st_size, last=last)
                data = os.pread(file.fileno(), stop - start, start)
        except OSError:
            return b""
        self._of[worker] = path, start + len(data)
        left_out = f"\n({start - sent:,} bytes were left out here)\n" if start > sent else ""
        return left_out.encode() + data


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
