# SPDX-License-Identifier: Apache-2.0
"""A wished speed at work: the run is measured step by step, and workers are chosen for it.

What is decided is in workers_for_speed.py; here are the clock and the words that people read.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean

from manyhands.driver.supervise.servers import servers_in
from manyhands.driver.supervise.worker_states import Situation
from manyhands.planning.pace.deadline import Aim
from manyhands.planning.pace.workers_for_speed import (
    MeasuredSpeed,
    WorkersChoice,
    remembered,
    speed_text,
    workers_for,
)
from manyhands.values import events

MEASURE_S = 5.0
"""How long to measure before anything is decided."""
ENOUGH_STEPS, QUICK_S = 20, 3.0
"""... or so many steps, if they took so long: heartbeats are a quarter of a second apart."""
SOON_S = 5.0
"""A run that is over so soon is left alone."""


@dataclass(slots=True)
class _Window:
    """What is being measured."""

    workers: int
    seconds: float = 0.0
    steps: int = 0
    records: int = 0

    @property
    def full(self) -> bool:
        quick = self.steps >= ENOUGH_STEPS and self.seconds >= QUICK_S
        return quick or (self.steps > 0 and self.seconds >= MEASURE_S)


class SpeedControl:
    """Chooses how many workers are wanted; `people` let it, until somebody says a number."""

    def __init__(
        self,
        aim: Aim,
        situation: Situation,
        tell: events.EventSink,
        *,
        left: Callable[[int], int],
        most: int,
        want: Callable[[int], None],
    ) -> None:
        """`left(step)` is how many records are to be trained on after so many steps; `want` tells
        whoever can bring room how many workers are wished for, be there room for them or not."""
        self.aim, self.now, self.tell = aim, situation, tell
        self.left, self.least, self.most, self.want = left, situation.wanted, most, want
        self.choice = WorkersChoice(situation.wanted, "the fewest, to begin with", None)
        self.measured: list[MeasuredSpeed] = []
        self.unmet = False
        """The wish cannot be met, and that was said."""
        self._window = _Window(0)
        self._seen: tuple[object, int, float] | None = None
        """Mark, step and time, when a step was last seen to be done."""
        self._fresh = False
        """Something was measured since the last choice."""
        want(situation.wanted + situation.serving)

    def observe(self) -> None:
        """Between two steps of one view without an evaluation nothing else takes time."""
        now, at = self.now, time.monotonic()
        if now.view is None or not now.running:
            return
        mark = (now.view.generation, now.scored)
        workers = len(now.view.members) - servers_in(now.view)
        if self._seen is not None and now.step <= self._seen[1]:
            return
        seen, self._seen = self._seen, (mark, now.step, at)
        if workers != self._window.workers:
            self._window = _Window(workers)
        if seen is None or seen[0] != mark:
            return
        window = self._window
        window.seconds += at - seen[2]
        window.steps += now.step - seen[1]
        window.records += self.left(seen[1]) - self.left(now.step)
        if window.full:
            found = MeasuredSpeed(workers, window.records / window.seconds, at)
            self.measured = remembered([*self.measured, found], at)
            self._fresh, self._window = True, _Window(workers)

    def choose(self, room: int) -> int:
        """How many workers are wanted now, given so much room; tells when that changes."""
        before = self.choice.value
        if self._fresh:
            self._fresh = False
            self._decide(room)
        wanted = max(self.least, min(self.choice.value, room))
        if wanted != self.now.wanted:
            why = [self.choice.because] * (self.choice.value != before)
            why += [f"there is room for {room}"] * (room < self.choice.value or not why)
            self.tell(
                events.Scaled(
                    step=self.now.step,
                    before=self.now.wanted,
                    workers=wanted,
                    because="; ".join(why),
                )
            )
        return wanted

    def _decide(self, room: int) -> None:
        clock, left = time.time(), self.left(self.now.step)
        coming = any(
            w.alive and w.phase in ("starting", "waiting") for w in self.now.workers.values()
        )
        if coming or left < SOON_S * self.speed:
            return
        wanted, here = self.aim.speed(left, clock), self.measured[-1]
        choice = workers_for(
            wanted, self.measured, here.at, self.least, self.most, by=self.aim.by(clock)
        )
        if choice.value != self.choice.value:
            self.want(choice.value + self.now.serving)
        self.choice = choice
        stays = min(choice.value, room) <= here.workers <= choice.value
        if choice.enough is False and stays and not self.unmet:
            self.unmet = True
            self._say_unmet(wanted, here.workers, in_vain=here.workers < min(room, self.most))

    def _say_unmet(self, wanted: float, workers: int, *, in_vain: bool) -> None:
        hands = f"{workers} worker{'s' * (workers != 1)}"
        most = "more were hardly faster" if in_vain else "there is room for no more"
        self.tell(
            events.Warned(
                text=f"{self.speed:,.0f} samples/s with {hands}, and {most}, where "
                f"{speed_text(wanted)} are wanted{self.aim.by(time.time())}: {self._forecast()}."
            )
        )

    @property
    def speed(self) -> float:
        """Lately; 0: not known yet."""
        here = [m.samples_per_s for m in self.measured if m.workers == self.measured[-1].workers]
        return mean(here[-3:]) if here else 0.0

    def _forecast(self) -> str:
        return self.aim.forecast(self.left(self.now.step), self.speed, time.time())

    def outlook(self) -> dict[str, str]:
        """For whoever asks how it goes."""
        speed = self.speed
        forecast = f"{speed:,.0f} samples/s: {self._forecast()}" if speed else "not measured yet"
        return {"wish": self.aim.wish(time.time()), "forecast": forecast}
