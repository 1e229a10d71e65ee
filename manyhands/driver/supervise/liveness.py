# SPDX-License-Identifier: Apache-2.0
"""The supervisor's clocks: how long ago each worker was heard of, got something done, or ended.

They stand still while the supervisor itself is not looking. A machine that stops for two seconds
(or a disk that makes the supervisor wait) stops those who should have been heard as well, and what
they said is still in the queue: nobody is blamed for time in which nobody listened.
"""

import time
from dataclasses import dataclass

from manyhands.driver.supervise.worker_states import Phase, Situation, WorkerState
from manyhands.values.messages import Beat

GLANCE_S = 0.25
"""The supervisor looks more often than this, unless it is kept from it."""


@dataclass(slots=True)
class _Times:
    heard: float
    phase: float
    progress: tuple[int, float]
    ended: float = 0.0


class Liveness:
    def __init__(self) -> None:
        self._of: dict[int, _Times] = {}
        self._began = 0.0
        self._looked = time.monotonic()

    def start(self, worker: int) -> None:
        now = time.monotonic()
        self._of[worker] = _Times(now, now, (0, now))

    def heard(self, worker: int) -> None:
        self._of[worker].heard = time.monotonic()

    def beat(self, beat: Beat) -> bool:
        """Whether something was done since the last one."""
        times = self._of[beat.worker]
        done = beat.progress != times.progress[0]
        if done or beat.waiting:
            times.progress = (beat.progress, time.monotonic())
        return done

    def enter(self, worker: WorkerState, phase: Phase) -> None:
        """A worker is in another phase from now on, and has all its patience before it."""
        now, times = time.monotonic(), self._of[worker.number]
        worker.phase = phase
        times.phase = times.heard = now
        times.progress = (times.progress[0], now)

    def ended(self, worker: int) -> None:
        self._of[worker].ended = time.monotonic()

    def begin(self) -> None:
        """A view is in force: speeds are measured from now on."""
        self._began = time.monotonic()

    def write_down(self, situation: Situation) -> None:
        now = time.monotonic()
        self._forgive(now, now - self._looked - GLANCE_S)
        self._looked = now
        for worker in situation.workers.values():
            times = self._of[worker.number]
            worker.silent_s, worker.phase_s = now - times.heard, now - times.phase
            worker.stuck_s = now - times.progress[1]
            worker.ended_s = now - times.ended if times.ended else 0.0
        situation.measured_s = now - self._began if situation.running else 0.0

    def _forgive(self, now: float, away: float) -> None:
        """The supervisor was away for so long: it does not count."""
        if away <= 0:
            return
        for times in self._of.values():
            times.heard = min(now, times.heard + away)
            times.phase = min(now, times.phase + away)
            times.progress = (times.progress[0], min(now, times.progress[1] + away))
