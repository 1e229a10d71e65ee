# SPDX-License-Identifier: Apache-2.0
"""Everywhere that what happens in a run is told: its diary, the terminal, metrics, status.json.

None of these may stop a run. A disk that is full is told of by saving; a terminal that was closed,
or a pipe that nobody reads, by nobody.
"""

import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import msgspec

from manyhands.driver.supervise.audience import Link, WorkerStatus
from manyhands.monitor.metric_writers import CsvWriter, TensorBoardWriter, Writer
from manyhands.monitor.terminal import Display, Progress, display
from manyhands.values import events
from manyhands.values.config import LogConfig
from manyhands.values.rundir import RunDir, write_whole


class RunOutputs:
    def __init__(self, run: RunDir, log: LogConfig, *, quiet: bool) -> None:
        self.run = run
        self.log = events.EventLog(run.events)
        self.loss_log = events.LossLog(run.losses)
        self.display: Display = display(quiet=quiet)
        self.writers: list[Writer] = []
        if log.csv:
            self.writers.append(CsvWriter(run.metrics))
        if log.tensorboard:
            self.writers.append(TensorBoardWriter(run.tensorboard))

    def _show(self, what: Callable[[Display], None]) -> None:
        with suppress(OSError, SystemExit):  # rich makes the latter of a broken pipe
            what(self.display)

    def note(self, text: str) -> None:
        """For the terminal alone."""
        self._show(lambda display: display.note(text))

    def event(self, event: events.AnyEvent) -> None:
        self.log.write(event)
        self._show(lambda display: display.event(event))
        for writer in self.writers:
            with suppress(OSError):
                writer.write(event)

    def losses(self, losses: Sequence[tuple[int, float]]) -> None:
        """Of every step, for a replay to compare with."""
        self.loss_log.write(losses)

    def progress(self, progress: Progress) -> None:
        self._show(lambda display: display.progress(progress))

    def status(
        self,
        state: str,
        progress: Progress,
        workers: Sequence[WorkerStatus],
        links: Sequence[Link],
        outlook: Mapping[str, str],
    ) -> None:
        status = {
            "state": state,
            "step": progress.step,
            "total_steps": progress.total_steps,
            "loss": progress.loss,
            "samples_per_s": progress.samples_per_s,
            **outlook,
            "pid": os.getpid(),
            "host": platform.node(),
            "time": time.time(),
            "workers": workers,
            "links": links,
        }
        with suppress(OSError):
            encoded = msgspec.json.format(msgspec.json.encode(status))
            write_whole(self.run.status, encoded, durable=False)

    def close(self) -> None:
        self._show(lambda display: display.close())
        self.log.close()
        self.loss_log.close()
        for writer in self.writers:
            with suppress(OSError):
                writer.close()


class SpeedMeter:
    """Records a second, of all workers together."""

    def __init__(self) -> None:
        self.lately = 0.0
        self.first_at: float | None = None
        """When the first step was heard of: what came before was start-up, not training."""
        self._first = self._last = (0.0, 0)

    def measure(self, records: int) -> None:
        """`records` were trained on until now."""
        now = time.time()
        if self.first_at is None:
            self.first_at = now
            self._first = self._last = (now, records)
        then, before = self._last
        if records > before and now > then:
            speed = (records - before) / (now - then)
            self.lately = speed if not self.lately else 0.8 * self.lately + 0.2 * speed
            self._last = (now, records)

    def mean(self) -> float:
        """Since the first step."""
        (then, before), (now, records) = self._first, self._last
        return (records - before) / (now - then) if now > then else self.lately
