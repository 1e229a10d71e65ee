# SPDX-License-Identifier: Apache-2.0
"""Logged steps and scores, also for other programs: CSV and TensorBoard."""

import csv
from pathlib import Path
from typing import Any, Protocol

from manyhands.values.errors import ConfigError
from manyhands.values.events import AnyEvent, Evaluated, Stepped, numbers_of


class Writer(Protocol):
    def write(self, event: AnyEvent) -> None: ...
    def close(self) -> None: ...


class CsvWriter:
    """One row per number: step, name, value. Long form, so that new numbers need no new column."""

    def __init__(self, path: Path) -> None:
        fresh = not path.exists()
        self.file = open(path, "a", newline="")  # noqa: SIM115 (closed by close)
        self.rows = csv.writer(self.file)
        if fresh:
            self.rows.writerow(["step", "name", "value"])

    def write(self, event: AnyEvent) -> None:
        for step, name, value in numbers(event):
            self.rows.writerow([step, name, repr(value)])
        self.file.flush()

    def close(self) -> None:
        self.file.close()


class TensorBoardWriter:
    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                "log.tensorboard needs the tensorboard package: pip install tensorboard"
            ) from error
        self.writer: Any = SummaryWriter(str(folder))

    def write(self, event: AnyEvent) -> None:
        for step, name, value in numbers(event):
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


def numbers(event: AnyEvent) -> list[tuple[int, str, float]]:
    """What is worth plotting in an event."""
    match event:
        case Stepped():
            named = {"train/loss": event.loss, "train/lr": event.lr}
            named |= {f"train/{name}": value for name, value in event.numbers.items()}
            return [(event.step, name, value) for name, value in named.items()]
        case Evaluated():
            return [(event.step, f"held_out/{n}", v) for n, v in numbers_of(event.scores).items()]
        case _:
            return []
