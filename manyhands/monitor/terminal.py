# SPDX-License-Identifier: Apache-2.0
"""What a person at the terminal sees: one live line, or plain lines when nobody watches live."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.text import Text

from manyhands.values.events import (
    AnyEvent,
    Audited,
    Changed,
    Evaluated,
    Hosted,
    Lost,
    Saved,
    Scaled,
    Skipped,
    Viewed,
    Warned,
    numbers_of,
)
from manyhands.values.printable_text import escaped
from manyhands.values.report import Report


@dataclass(slots=True)
class Progress:
    """Where training is, as of the last heartbeat."""

    step: int = 0
    total_steps: int = 1
    epoch: float = 0.0
    loss: float = math.nan
    samples_per_s: float = 0.0
    batch: int = 1
    workers: int = 0
    servers: int = 0

    @property
    def eta_s(self) -> float:
        if self.samples_per_s <= 0:
            return math.inf
        return (self.total_steps - self.step) * self.batch / self.samples_per_s

    def line(self) -> str:
        hands = f"{self.workers} worker" + "s" * (self.workers != 1)
        if self.servers:
            hands += f", {self.servers} server" + "s" * (self.servers != 1)
        return (
            f"step {self.step}/{self.total_steps}  epoch {self.epoch:.2f}  "
            f"loss {self.loss:.4f}  {_thousands(self.samples_per_s)} samples/s  "
            f"{hands}  {duration(self.eta_s)} left"
        )


class Display(Protocol):
    def note(self, text: str) -> None: ...
    def progress(self, progress: Progress) -> None: ...
    def event(self, event: AnyEvent) -> None: ...
    def close(self) -> None: ...


class Quiet:
    """Nothing but warnings."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def note(self, text: str) -> None: ...
    def progress(self, progress: Progress) -> None: ...

    def event(self, event: AnyEvent) -> None:
        if isinstance(event, Warned | Lost) and (text := describe(event)) is not None:
            self.console.print(escaped(text), markup=False, highlight=False)

    def close(self) -> None: ...


class Plain:
    """Lines, for files and pipes: at most one every few seconds."""

    def __init__(self, console: Console, every_s: float = 5.0) -> None:
        self.console, self.every_s = console, every_s
        self.last = time.monotonic() - every_s + 1.0  # the first line after a second
        self.shown = -1

    def note(self, text: str) -> None:
        self.console.print(escaped(text), markup=False, highlight=False, soft_wrap=True)

    def progress(self, progress: Progress) -> None:
        now = time.monotonic()
        due = now - self.last >= self.every_s or progress.step == progress.total_steps
        if due and progress.samples_per_s > 0 and progress.step != self.shown:
            self.last, self.shown = now, progress.step
            self.note(progress.line())

    def event(self, event: AnyEvent) -> None:
        if (text := describe(event)) is not None:
            self.note(text)

    def close(self) -> None: ...


class Watched:
    """A live line in a terminal, with what happens scrolling above it."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.live = Live(Text("starting workers …"), console=console, refresh_per_second=8)
        self.live.start()

    def note(self, text: str) -> None:
        self.console.print(escaped(text), markup=False, highlight=False)

    def progress(self, progress: Progress) -> None:
        if progress.step == 0:
            return
        width = max(10, min(24, self.console.width - 90))
        done = round(width * progress.step / progress.total_steps)
        bar = Text("━" * done, style="green") + Text("━" * (width - done), style="dim")
        self.live.update(bar + Text(" " + progress.line()))

    def event(self, event: AnyEvent) -> None:
        if (text := describe(event)) is not None:
            self.note(text)

    def close(self) -> None:
        self.live.stop()


def display(*, quiet: bool) -> Display:
    console = Console(stderr=True)
    if quiet:
        return Quiet(console)
    return Watched(console) if console.is_terminal else Plain(console)


def describe(event: AnyEvent) -> str | None:
    """An event as a line, if people want to see it."""
    match event:
        case Viewed():
            hands = ", ".join(
                f"rank {rank} {'serves as' if rank in event.servers else 'is'} process {pid}"
                for rank, pid in event.members.items()
            )
            return (
                f"view {event.generation}, from step {event.first_step} ({event.because}): {hands}"
            )
        case Evaluated():
            return f"step {event.step}: held-out {scores_text(numbers_of(event.scores))}"
        case Saved():
            size = f"{event.size_bytes / 1e6:.1f} MB"
            return f"step {event.step}: saved ({size}, training stood {event.blocked_s:.3f} s)"
        case Warned():
            return f"warning: {event.text}"
        case Lost(ranks=[_, _, *_]):
            ranks = ", ".join(str(rank) for rank in event.ranks)
            return f"step {event.step}: ranks {ranks} are lost: {event.what}; {event.noticed_by}"
        case Lost():
            return (
                f"step {event.step}: rank {event.rank} (process {event.pid}) is lost: "
                f"{event.what}; {event.noticed_by}"
            )
        case Hosted():
            return f"host {event.host} {event.what}"
        case Audited():
            return f"step {event.step}: audit of micro-batch {event.micro_batch}: {event.text}"
        case Scaled(because=because) if because:
            return f"step {event.step}: {event.before} → {event.workers} workers: {because}"
        case Scaled(servers=servers):
            also = "" if servers is None else f", {servers} servers"
            hands = f"from {event.before} to {event.workers} workers{also}"
            return f"step {event.step}: {hands}, as asked"
        case Skipped():
            return f"step {event.step}: skipped: {event.why}"
        case Changed():
            said = ", ".join(f"{name} = {value}" for name, value in event.settings.items())
            return f"step {event.step}: from here on {said}"
        case _:
            return None


def scores_text(scores: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.4f}" for name, value in scores.items())


def summary(report: Report) -> str:
    """The table at the end of a run. Never folded: people copy paths and fingerprints."""
    rows = {
        "steps": f"{report.step} ({report.epochs:.2f} epochs; {report.because})",
        "loss": f"{report.loss:.4f}",
        **{f"held-out {name}": f"{value:.4f}" for name, value in report.scores.items()},
        **({} if report.best_step is None else {"best step": str(report.best_step)}),
        "workers": str(report.workers)
        + f" (losses survived: {report.recoveries})" * bool(report.recoveries),
        "speed": f"{_thousands(report.samples_per_s)} samples/s",
        "time": f"{report.seconds:.1f} s (first step after {report.first_step_s:.1f} s)",
        "peak memory": f"{report.peak_memory_bytes / 1e6:.0f} MB, all workers",
        "fingerprint": report.fingerprint,
        "run folder": report.run,
    }
    width = max(len(name) for name in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _thousands(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
