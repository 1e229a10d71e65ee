# SPDX-License-Identifier: Apache-2.0
"""Everywhere that what happens in a run is told: its events, the terminal, metrics.

None of these may stop a run. A disk that is full is told of by saving; a terminal that was closed,
or a pipe that nobody reads, by nobody.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress

from manyhands.monitor.metric_writers import CsvWriter, TensorBoardWriter, Writer
from manyhands.monitor.terminal import Display, Progress, display
from manyhands.values import events
from manyhands.values.config import LogConfig
from manyhands.values.run_folder import RunDir


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

    def close(self) -> None:
        self._show(lambda display: display.close())
        self.log.close()
        self.loss_log.close()
        for writer in self.writers:
            with suppress(OSError):
                writer.close()
