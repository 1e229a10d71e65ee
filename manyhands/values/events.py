# SPDX-License-Identifier: Apache-2.0
"""What happened in a run, as records: one JSON object a line in events.jsonl, oldest first.

The file is what dashboards, resumes and people read later. A line that was cut off by a crash is
skipped when reading. `time` is seconds since 1970.
"""

import math
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import msgspec

from manyhands.values.server_load import ServerStatus


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag=True):
    time: float = msgspec.field(default_factory=time.time)


class Started(Event, frozen=True):
    """The driver began (or resumed, when `step` is not 0)."""

    step: int
    total_steps: int
    workers: int
    pid: int
    host: str


class Viewed(Event, frozen=True):
    """Who is in, since when."""

    generation: int
    first_step: int
    members: dict[int, int]
    """rank → process id"""
    because: str
    servers: list[int] = []
    """Ranks of those that compute nothing, and update the weights."""


class Stepped(Event, frozen=True):
    """Every `log.every_steps` steps. `numbers` are those returned beside the loss."""

    step: int
    epoch: float
    loss: float
    lr: float
    samples_per_s: float
    numbers: dict[str, float] = {}


class Evaluated(Event, frozen=True):
    """A score that is not a number is null in JSON, and so None when it is read back."""

    step: int
    scores: dict[str, float | None]


class Saved(Event, frozen=True):
    step: int
    size_bytes: int
    blocked_s: float
    """How long training stood still for it (the slowest worker)."""


class Deleted(Event, frozen=True):
    step: int
    because: str


class Warned(Event, frozen=True):
    """Something a person should know that did not stop the run."""

    text: str


class Exited(Event, frozen=True):
    rank: int
    pid: int
    how: str


class Lost(Event, frozen=True):
    """A worker is gone, and how that was noticed."""

    rank: int
    worker: int
    pid: int
    step: int
    what: str
    noticed_by: str
    ranks: list[int] = []
    """All that went with a host; empty: this worker alone."""


class Recovered(Event, frozen=True):
    """After a loss, training goes on."""

    step: int
    workers: int
    seconds: float
    """From noticing the loss."""
    recomputed: int
    """Micro-batches, at the most."""
    because: str


class Audited(Event, frozen=True):
    """Workers computed the same micro-batch and were compared."""

    step: int
    micro_batch: int
    text: str
    guilty: list[int]


class Hosted(Event, frozen=True):
    """A host has come or gone."""

    host: str
    what: str


class Linked(Event, frozen=True):
    """The network between two hosts, as they measured it."""

    host: str
    other: str
    round_trip_s: float
    bytes_per_s: float
    """In both directions at once."""


class Scaled(Event, frozen=True):
    """Another number of workers is wanted: somebody asked for it, or a wished speed needs it."""

    step: int
    before: int
    workers: int
    because: str = ""
    """Empty: somebody asked for it."""
    servers: int | None = None
    """... and so many servers; None: as many as before."""


class Served(Event, frozen=True):
    """Once a minute and at the end: what servers had to do since the last of these."""

    step: int
    servers: list[ServerStatus]
    staleness: list[int] = []
    """Where workers are at different steps, since the run began: by how many others were applied
    between what a step had read and itself, how many steps."""


class Changed(Event, frozen=True):
    """Settings in force from `step` on."""

    step: int
    settings: dict[str, Any]


class Skipped(Event, frozen=True):
    """A step that was not applied: something in it was not finite."""

    step: int
    why: str


class Finished(Event, frozen=True):
    step: int
    because: str
    fingerprint: str
    scores: dict[str, float | None]


class Failed(Event, frozen=True):
    step: int
    verdict: str


class Stopped(Event, frozen=True):
    """By a person; `step` was saved."""

    step: int


AnyEvent = (
    Started
    | Viewed
    | Stepped
    | Evaluated
    | Saved
    | Deleted
    | Warned
    | Exited
    | Lost
    | Recovered
    | Audited
    | Hosted
    | Linked
    | Scaled
    | Served
    | Changed
    | Skipped
    | Finished
    | Failed
    | Stopped
)

EventSink = Callable[[AnyEvent], None]
"""Whoever is told of events."""


class EventLog:
    """Appends to events.jsonl. Each event is one write, so a crash can only cut off the last."""

    def __init__(self, path: Path) -> None:
        self.file: IO[bytes] = open(path, "ab", buffering=0)  # noqa: SIM115 (closed by close)
        self.whole = path.stat().st_size == 0 or path.read_bytes()[-1:] == b"\n"

    def write(self, event: AnyEvent) -> None:
        line = msgspec.json.encode(event) + b"\n"
        if not self.whole:  # the line before was cut off: do not write into it
            line, self.whole = b"\n" + line, True
        # A full disk must not stop the run for the sake of its diary; saving will tell.
        with suppress(OSError):
            self.whole = self.file.write(line) == len(line)

    def close(self) -> None:
        self.file.close()


def read_events(path: Path) -> Iterator[AnyEvent]:
    decoder = msgspec.json.Decoder(AnyEvent)
    with suppress(FileNotFoundError), open(path, "rb") as file:
        for line in file:
            with suppress(msgspec.DecodeError, UnicodeDecodeError):
                yield decoder.decode(line)


_LOSS = struct.Struct("<qd")


class LossLog:
    """losses.bin: the loss of every step, in 16 bytes each, to compare with when it is replayed."""

    def __init__(self, path: Path) -> None:
        self.file: IO[bytes] = open(path, "ab")  # noqa: SIM115 (closed by close)
        self.file.truncate(self.file.tell() // _LOSS.size * _LOSS.size)

    def write(self, losses: Iterable[tuple[int, float]]) -> None:
        with suppress(OSError):  # as with the diary: saving will tell of a full disk
            for step, loss in losses:
                self.file.write(_LOSS.pack(step, loss))
            self.file.flush()

    def close(self) -> None:
        with suppress(OSError):
            self.file.close()


def read_losses(path: Path) -> dict[int, float]:
    """After so many steps → the loss. What was computed again after a resume counts."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return {}
    whole = len(data) // _LOSS.size * _LOSS.size
    return {step: loss for step, loss in _LOSS.iter_unpack(data[:whole])}


def numbers_of(scores: Mapping[str, float | None]) -> dict[str, float]:
    """Scores as they were before JSON made null of NaN."""
    return {name: math.nan if value is None else value for name, value in scores.items()}
