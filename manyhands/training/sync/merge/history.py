# SPDX-License-Identifier: Apache-2.0
"""What must hold of every push and read, checked in a recorded history.

A history is what workers and servers of a run wrote down (where a test asks for it:
`FaultPlan.recording`), each with the time at which it happened. `violations` is a pure function of
it, and knows nothing of how servers work: the memory of a host is the row of pushes that were
applied to it; what survives is the row of those hosts that were in the last view.

- Nothing acknowledged is lost, and nothing is applied twice.
- What a worker reads survives; it never reads an older version than before, nor weights staler
  than the bound.
- All hosts of a view have the same row, and the same bits as it begins.
- Every step that is done is in it.
"""

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from zlib import crc32

import msgspec
import torch
from torch import Tensor

from manyhands.training.sync.merge.staleness import NO_STEPS, AppliedSteps, may_begin


class Recorded(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    at: float
    """When, in seconds."""
    memory: int
    """Of which host: it ends with it, and has a number that no other has."""


class PushMade(Recorded, frozen=True):
    """A worker has pushed."""

    worker: int
    step: int
    read: int
    """It was computed on the weights after so many pushes."""


class PushSettled(Recorded, frozen=True):
    """A push is acknowledged, as number `number`: the head has seen that all servers have it."""

    number: int
    step: int


class PushApplied(Recorded, frozen=True):
    """It is being applied to the memory of a host."""

    number: int
    step: int


class ViewEntered(Recorded, frozen=True):
    """A host goes on in a view with what is in its memory."""

    generation: int
    done: int
    """After so many pushes, ..."""
    applied: tuple[int, ...]
    """... of these steps (`AppliedSteps.words`)."""
    digest: int = 0
    """Of the bits of its weights and of what the optimizer keeps."""


HistoryEvent = PushMade | PushSettled | PushApplied | ViewEntered


class Recorder:
    """Writes down what one process has to tell, in a file of its own; without a folder, nothing. A
    line is there, or it is not."""

    def __init__(self, folder: str = "", worker: int = 0, fd: int | None = None) -> None:
        """`fd`: of the host's memory. Times are comparable on one machine, which is where histories
        are recorded."""
        self.worker, self.memory, self._out = worker, 0, -1
        if folder:
            path = Path(folder) / f"worker-{worker:03}.jsonl"
            self._out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            self.memory = os.fstat(fd).st_ino if fd is not None else 0

    def made(self, step: int, read: int) -> None:
        at, memory = time.monotonic(), self.memory
        self._write(PushMade(at=at, memory=memory, worker=self.worker, step=step, read=read))

    def applies(self, number: int, step: int) -> None:
        """Before anybody can read it."""
        at = time.monotonic()
        self._write(PushApplied(at=at, memory=self.memory, number=number, step=step))

    def settled(self, number: int, step: int) -> None:
        at = time.monotonic()
        self._write(PushSettled(at=at, memory=self.memory, number=number, step=step))

    def entered(
        self, generation: int, done: int, applied: AppliedSteps, kept: Iterable[Tensor] = ()
    ) -> None:
        """`kept`: the state, while nobody writes to it."""
        if self._out < 0:
            return
        at, words, digest = time.monotonic(), applied.words, 0
        for lane in kept:
            digest = crc32(lane.detach().view(torch.uint8).numpy().data, digest)
        self._write(
            ViewEntered(
                at=at,
                memory=self.memory,
                generation=generation,
                done=done,
                applied=words,
                digest=digest,
            )
        )

    def _write(self, event: HistoryEvent) -> None:
        if self._out >= 0:
            os.write(self._out, msgspec.json.encode(event) + b"\n")


def read_history(folder: Path) -> list[HistoryEvent]:
    lines = [line for path in folder.glob("*.jsonl") for line in path.read_bytes().splitlines()]
    events = [msgspec.json.decode(line, type=HistoryEvent) for line in lines]
    return sorted(events, key=lambda event: event.at)


@dataclass(frozen=True, slots=True)
class Violation:
    rule: str
    """One of `RULES`."""
    told: str


RULES = (
    "lost",  # acknowledged, and not in what survives
    "twice",  # a step is in a row again
    "order",  # applied out of order, or begun with what nobody had
    "differ",  # two hosts of one view have other rows, or began it with other bits
    "vanished",  # read, and not in what survives
    "backwards",  # a worker read an older version than before
    "stale",  # a worker computed on weights staler than the bound
    "never",  # a step that is done is not in what survives
)


def violations(
    history: Iterable[HistoryEvent], *, bound: int | None = None, done: Iterable[int] = ()
) -> list[Violation]:
    """Everything that is wrong with a history. `bound` is that of staleness; `done` are the steps
    that were told to be finished."""
    events = sorted(history, key=lambda event: event.at)
    rows = _Rows()
    for event in events:
        rows.replay(event)
    last = [row for memory, row in rows.of.items() if rows.entered.get(memory) == rows.newest]
    survivor = max(last, key=len, default=[])
    found = rows.wrong
    found += [
        Violation("differ", f"{row} and {survivor}") for row in last if row != survivor[: len(row)]
    ]
    found += _other_bits(events)
    found += _line(survivor, events, done)
    found += _reads(survivor, events, rows, bound)
    return found


class _Rows:
    """Of every host, as the history goes on."""

    def __init__(self) -> None:
        self.of: dict[int, list[int]] = {}
        self.entered: dict[int, int] = {}
        self.newest = 0
        self.read: dict[PushMade, list[int]] = {}
        """What a worker read."""
        self.wrong: list[Violation] = []

    def replay(self, event: HistoryEvent) -> None:
        row = self.of.setdefault(event.memory, [])
        match event:
            case PushApplied(number=n, step=step):
                if n > len(row) or (n < len(row) and row[n] != step):  # again is after a death
                    told = f"step {step} as number {n} in memory {event.memory}, after {len(row)}"
                    self.wrong.append(Violation("order", told))
                row[n : n + 1] = [step]
            case ViewEntered(generation=generation, done=done, applied=words):
                self.entered[event.memory] = generation
                self.newest = max(self.newest, generation)
                self.of[event.memory] = self._row_of(row, done, AppliedSteps.from_words(words))
            case PushMade(read=read):
                self.read[event] = row[:read]
            case PushSettled():
                pass

    def _row_of(self, mine: list[int], done: int, applied: AppliedSteps) -> list[int]:
        """That of its own, of another who gave it all it had, or of a checkpoint."""
        saved = list(range(done))
        for row in (mine, *self.of.values(), saved):
            if len(row) >= done and _steps(row[:done]) == applied:
                return row[:done]
        self.wrong.append(Violation("order", f"nobody had {applied} after {done} pushes"))
        return saved


def _steps(row: Iterable[int]) -> AppliedSteps:
    found = NO_STEPS
    for step in row:
        found = found.add(step)
    return found


def _other_bits(events: Sequence[HistoryEvent]) -> Iterator[Violation]:
    first: dict[int, ViewEntered] = {}
    for event in events:
        if isinstance(event, ViewEntered):
            other = first.setdefault(event.generation, event)
            if (other.done, other.digest) != (event.done, event.digest):
                yield Violation("differ", f"{other} and {event}")


def _line(
    row: Sequence[int], events: Sequence[HistoryEvent], done: Iterable[int]
) -> Iterator[Violation]:
    for number, step in enumerate(row):
        if step in row[:number]:
            yield Violation("twice", f"step {step} again as number {number}")
    for event in events:
        if isinstance(event, PushSettled) and row[event.number : event.number + 1] != [event.step]:
            yield Violation("lost", f"step {event.step}, acknowledged as number {event.number}")
    for step in sorted(set(done) - set(row)):
        yield Violation("never", f"step {step} is done, and not there")


def _reads(
    row: Sequence[int], events: Sequence[HistoryEvent], rows: _Rows, bound: int | None
) -> Iterator[Violation]:
    pushes = [event for event in events if isinstance(event, PushMade)]
    for push in pushes:
        who = f"worker {push.worker}, for step {push.step}, read version {push.read}"
        if len(rows.read[push]) < push.read or rows.read[push] != list(row[: push.read]):
            yield Violation("vanished", f"{who}, and it is gone")
        elif not may_begin(push.step, _steps(row[: push.read]), bound):
            yield Violation("stale", who)
    for worker in sorted({push.worker for push in pushes}):
        for before, after in pairwise(p for p in pushes if p.worker == worker):
            if after.read < before.read:
                yield Violation("backwards", f"worker {worker}: {after.read} after {before.read}")
