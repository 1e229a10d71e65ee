# SPDX-License-Identifier: Apache-2.0
"""What a worker is doing right now: written by its training thread, sent by its line's thread."""

import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Protocol

from manyhands.values.bounded_types import SOME
from manyhands.values.messages import Beat, StepRecord
from manyhands.values.printable_text import printable
from manyhands.values.server_load import ServerLoad
from manyhands.values.user_frames import user_stack
from manyhands.values.work_in_hand import Kind, WorkInHand


class TakesNotes(Protocol):
    """Where a note of the work in hand is kept that outlives this process."""

    def note(self, kind: Kind, step: int, index: int) -> None: ...


LOST_IN_THOUGHT_S = 1.0
MOST_STEPS = SOME // 2
"""In a beat; the next one tells of the others."""
"""After so long without progress a beat tells where in the user's code the worker is."""


class Heartbeat:
    def __init__(self, worker: int, *, log_every: int, mark: TakesNotes | None = None) -> None:
        self.worker, self.log_every, self.leads = worker, log_every, False
        self._mark, self._thread = mark, threading.get_ident()
        self.step, self.loss = 0, math.nan
        self.records = 0
        """Records that all workers together have trained on since this one joined."""
        self.computed = 0
        """Those that this worker itself computed."""
        self.work, self.first = WorkInHand(), True
        self._doing: tuple[Kind, int, bool] = ("build", 0, False)
        self._done: set[tuple[Kind, int, bool]] = set()
        """What it has been through: kinds of work, each with the number of records, and whether
        they were gone through for the second time in their step."""
        self.progress, self._seen = 0, (0, time.monotonic())
        self.waiting = False
        self._times: deque[float] = deque(maxlen=15)
        self._log: list[StepRecord] = []
        self._losses: list[tuple[int, float]] = []
        self._reads: list[tuple[int, int]] = []
        self._last = (time.monotonic(), 0)
        self.load: Callable[[], ServerLoad | None] = lambda: None
        """What this worker did as a server since that was last asked."""
        self._handing_over = threading.Lock()

    @property
    def current(self) -> tuple[int, int] | None:
        """The step and micro-batch in work."""
        return (self.work.step, self.work.index) if self.work.kind == "compute" else None

    def begin(
        self, kind: Kind, step: int, index: int = -1, records: int = 0, *, again: bool = False
    ) -> None:
        """From now on this is in hand. What was is done."""
        self._done.add(self._doing)
        self._doing = (kind, records, again)
        if self._mark is not None:
            self._mark.note(kind, step, index)
        self.first = self._doing not in self._done
        self.work = WorkInHand(kind, step, index)
        self.progress += 1

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
        read: int = 0,
    ) -> None:
        self.begin("rest", step)
        self.step, self.loss = step, loss
        self.records += records
        if not self.leads:
            return
        with self._handing_over:
            self._losses.append((step, loss))
            if read:
                self._reads.append((step - 1, read))
            if step % self.log_every == 0 or step == 1:
                self._log.append(StepRecord(step, epoch, loss, lr, self.records, numbers))

    def beat(self) -> Beat:
        with self._handing_over:
            now, (then, before) = time.monotonic(), self._last
            self._last = (now, self.computed)
            log, self._log = self._log[:MOST_STEPS], self._log[MOST_STEPS:]
            losses, self._losses = self._losses[:MOST_STEPS], self._losses[MOST_STEPS:]
            reads, self._reads = self._reads[:MOST_STEPS], self._reads[MOST_STEPS:]
        times = list(self._times)
        return Beat(
            worker=self.worker,
            step=self.step,
            samples_per_s=(self.computed - before) / max(now - then, 1e-9),
            steps=log,
            losses=losses,
            reads=reads,
            loss=self.loss if self.leads and self.records else None,
            records=self.records,
            progress=self.progress,
            waiting=self.waiting,
            micro_batch_s=median(times) if len(times) >= 3 else 0.0,
            work=self.work,
            first=self.first,
            where=self._where(now),
            load=self.load(),
        )

    def _where(self, now: float) -> str:
        """Where in the user's code its thread is, when it has been there for a while."""
        if self.waiting or self.progress != self._seen[0]:
            self._seen = (self.progress, now)
        if now - self._seen[1] < LOST_IN_THOUGHT_S:
            return ""
        frame = sys._current_frames().get(self._thread)  # pyright: ignore[reportPrivateUsage]
        return printable(user_stack(frame)) if frame is not None else ""


class Waiting:
    """A worker's patience: entered while it waits for others, so that nobody blames it."""

    def __init__(self, heartbeat: Heartbeat, broken: Callable[[], bool]) -> None:
        self.heartbeat, self.broken = heartbeat, broken

    def __enter__(self) -> None:
        self.heartbeat.waiting = True

    def __exit__(self, *error: object) -> None:
        self.heartbeat.waiting = False
