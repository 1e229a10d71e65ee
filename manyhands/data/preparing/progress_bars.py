# SPDX-License-Identifier: Apache-2.0
"""How far a preparation is: a bar for each phase."""

from collections.abc import Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from manyhands.data.mapreduce.resumable_tasks import PhaseProgress


@contextmanager
def bars(*, quiet: bool) -> Generator["Bars | None"]:
    """A bar for each phase, on a terminal; lines where nobody watches."""
    if quiet:
        yield None
        return
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description:<10}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=console, disable=not console.is_terminal) as bar:
        yield Bars(bar)


class Bars:
    def __init__(self, bar: Bar) -> None:
        self.bar, self.phase, self.task = bar, "", None

    def __call__(self, now: PhaseProgress) -> None:
        if now.phase != self.phase:
            self.phase, self.task = now.phase, self.bar.add_task(now.phase, total=now.total)
        if self.task is not None:
            self.bar.update(self.task, completed=now.done)
