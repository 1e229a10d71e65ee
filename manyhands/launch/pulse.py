# SPDX-License-Identifier: Apache-2.0
"""What a worker is doing right now: written by its training thread, sent by its line's thread."""

import math
import time

from manyhands.launch.messages import Beat, StepRecord


class Pulse:
    def __init__(self, worker: int, *, log_every: int) -> None:
        self.worker, self.log_every, self.leads = worker, log_every, False
        self.step, self.loss = 0, math.nan
        self.records = 0
        """Records that all workers together have trained on since this one joined."""
        self.computed = 0
        """Those that this worker itself computed."""
        self.current: tuple[int, int] | None = None
        """The step and micro-batch in work."""
        self._log: list[StepRecord] = []
        self._last = (time.monotonic(), 0)

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
        if self.leads and (step % self.log_every == 0 or step == 1):
            self._log.append(StepRecord(step, epoch, loss, lr, self.records, numbers))

    def beat(self) -> Beat:
        now, (then, before) = time.monotonic(), self._last
        self._last = (now, self.computed)
        log, self._log = self._log, []
        return Beat(
            worker=self.worker,
            step=self.step,
            samples_per_s=(self.computed - before) / max(now - then, 1e-9),
            steps=log,
            loss=self.loss if self.leads and self.records else None,
            records=self.records,
        )
