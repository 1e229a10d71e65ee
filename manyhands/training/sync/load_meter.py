# SPDX-License-Identifier: Apache-2.0
"""What a server has had to do since that was last asked: counted by the thread that does it, asked
for by the one that sends heartbeats. A worker that does not serve has nothing to tell."""

import threading
import time
from collections.abc import Iterable

from manyhands.training.state.layout import Layout, Span
from manyhands.values.server_load import MOST_SIZES, ServerLoad, size_of_time


class LoadMeter:
    def __init__(self) -> None:
        self._handing_over = threading.Lock()
        self._own_bytes, self._share = 0, 0.0
        self._serves = False
        self._clear()

    def _clear(self) -> None:
        self._since = time.monotonic()
        self._applied = self._size_bytes = self._waiting = 0
        self._busy_s = 0.0
        self._times = [0] * MOST_SIZES

    def serve(self, layout: Layout, spans: Iterable[Span]) -> None:
        """From now on it updates these."""
        whole = sum(p.numel * p.dtype.itemsize for p in layout.trainable)
        with self._handing_over:
            self._own_bytes = sum((s.stop - s.start) * s.piece.dtype.itemsize for s in spans)
            self._share = self._own_bytes / max(1, whole)
            self._serves = True
            self._clear()

    def rest(self) -> None:
        """From now on it serves nobody."""
        self._serves = False

    def applied(self, busy_s: float, took_s: float | None = None, waiting: int = 0) -> None:
        """One more. `took_s`: since it was pushed; None: since it could be applied."""
        size = size_of_time(busy_s if took_s is None else took_s)
        with self._handing_over:
            self._applied += 1
            self._size_bytes += self._own_bytes
            self._busy_s += busy_s
            self._waiting += waiting
            self._times[size] += 1

    def take(self) -> ServerLoad | None:
        """Since it was last taken; None: it does not serve."""
        if not self._serves:
            return None
        with self._handing_over:
            times = self._times
            while times and times[-1] == 0:
                times.pop()
            load = ServerLoad(
                seconds=time.monotonic() - self._since,
                share=self._share,
                applied=self._applied,
                size_bytes=self._size_bytes,
                busy_s=self._busy_s,
                waiting=self._waiting,
                times=times,
            )
            self._clear()
        return load
