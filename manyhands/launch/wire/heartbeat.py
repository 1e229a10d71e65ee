# SPDX-License-Identifier: Apache-2.0
"""What a worker is doing right now: written by its training thread, sent by its line's thread."""

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from statistics import median

from manyhands.values.messages import Beat, StepRecord


class Heartbeat:
    def __init__(self, worker: int, *, log_every: int) -> None:
        self.worker, self.log_every, self.leads = worker, log_every, False
        self.step, self.loss = 0, math.nan
        self.records = 0
        """Records that all workers together have trained on since this one joined."""
        self.computed = 0
        """Those that this worker itself computed."""
        self.current: tuple[int, int] | None = None
        """The step and micro-batch in work."""
        self.progress = 0
        self.waiting = True
        self._times: deque[float] = deque(maxlen=15)
        self._log: list[StepRecord] = []
        self._losses: list[tuple[int, float]] = []
        self._last = (time.monotonic(), 0)
        self._handing_over = threading.Lock()

    def did(self, seconds: float, records: int) -> None:
        """A micro-batch was computed."""
        self.computed += records
        self.progress += 1
        self._times.append(seconds)

    def forget_times(self) -> None:
        """The deal has changed, and with it how workers get in each other's way."""
        self._times.clear()

    def stepped(
        self,
        step: int,
        epoch: float,
        loss: float,
        lr: float,
        records: int,
        numbers: dict[str, float],
    ) -> None:
        self.current = None
        self.step, self.loss = step, loss
        self.records += records
        self.progress += 1
        if not self.leads:
            return
        with self._handing_over:
            self._losses.append((step, loss))
            if step % self.log_every == 0 or step == 1:
                self._log.append(StepRecord(step, epoch, loss, lr, self.records, numbers))

    def beat(self) -> Beat:
        with self._handing_over:
            now, (then, before) = time.monotonic(), self._last
            self._last = (now, self.computed)
            log, self._log = self._log, []
            losses, self._losses = self._losses, []
        times = list(self._times)
        return Beat(
            worker=self.worker,
            step=self.step,
            samples_per_s=(self.computed - before) / max(now - then, 1e-9),
            steps=log,
            losses=losses,
            loss=self.loss if self.leads and self.records else None,
            records=self.records,
            progress=self.progress,
            waiting=self.waiting,
            micro_batch_s=median(times) if len(times) >= 3 else 0.0,
            seasoned=self.records > 0,
        )


class Waiting:
    """A worker's patience: entered while it waits for others, so that nobody blames it."""

    def __init__(self, heartbeat: Heartbeat, broken: Callable[[], bool]) -> None:
        self.heartbeat, self.broken = heartbeat, broken

    def __enter__(self) -> None:
        self.heartbeat.waiting = True

    def __exit__(self, *error: object) -> None:
        self.heartbeat.waiting = False
