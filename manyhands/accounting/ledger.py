# SPDX-License-Identifier: Apache-2.0
"""What a run did, written down: which steps, what they consumed, by whom, and what changed.

One JSON object a line in ledger.jsonl, oldest first. Steps, epochs and positions count from 0;
ranges are half open. The file alone proves that nothing was lost or done twice (proof.py).

A line counts once its newline is there. What a crash cut off was never promised, so it is not read
and the next writer removes it.
"""

import errno
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec

from manyhands.accounting.deal_micro_batches import Cut, cut
from manyhands.accounting.phases import Phases
from manyhands.values.config import HEARD_SCORE
from manyhands.values.errors import RunDirError
from manyhands.values.kernels import Kernels
from manyhands.values.run_folder import naming, sync_folder

EpochStretch = tuple[int, int, int]
"""Positions [start, stop) of one epoch, as (epoch, start, stop)."""


class LedgerEntry(msgspec.Struct, frozen=True, tag_field="entry", tag=True): ...


class Opened(LedgerEntry, frozen=True):
    """The first line: the shape of the run, the same for life."""

    records: int
    batch: int
    micro_batch: int
    seed: int
    phases: Phases | None = None
    """Of several optimizers: which of them takes which step."""

    @property
    def shape(self) -> dict[str, Any]:
        """The keywords of `cut` and `runs_of`."""
        sizes = {"records": self.records, "batch": self.batch, "micro_batch": self.micro_batch}
        return {**sizes, "phases": self.phases}

    def batch_at(self, number: int) -> Cut:
        """Where a batch lies (from 0), whoever reads it."""
        return cut(number, records=self.records, batch=self.batch, micro_batch=self.micro_batch)


class Committed(LedgerEntry, frozen=True):
    """Steps [first, stop) are done, by the members of one view."""

    first: int
    stop: int
    runs: list[EpochStretch]
    """What they consumed, in order, merged where adjacent: one run for each epoch touched."""
    generation: int
    workers: list[int]
    """Worker numbers (for life), by rank."""
    speeds: list[float]
    """By rank; `deal` gives each rank's micro-batches from them."""
    rates: list[float | None]
    """Learning rate of each parameter group when the view began; empty when it is not known."""
    loss: float | None
    """Of the last step; None when it is not a number, or a rewind cut the range."""


class SettingsChanged(LedgerEntry, frozen=True, tag="Changed"):
    """From step `step` on these settings are in force."""

    step: int
    settings: dict[str, Any]


class StepSkipped(LedgerEntry, frozen=True, tag="Skipped"):
    """Step `step` consumed its records and changed nothing: something in it was not finite."""

    step: int
    why: str


class Rewound(LedgerEntry, frozen=True):
    """The run went back to having done `step` steps: steps >= it are void, and changes > it.

    A change in force from exactly `step` stays: it was made when those steps were done, so the
    checkpoint may or may not hold it. Whoever resumes applies `changes_after(entries, step)`.
    """

    step: int


class Computing(LedgerEntry, frozen=True):
    """From step `step` on these kernels compute; more than one where hosts are unlike."""

    step: int
    kernels: list[Kernels]


class SampledEpochs(LedgerEntry, frozen=True, tag="Sampled"):
    """After the first line, where an epoch does not visit every record once: what stands at its
    positions, which the first line calls records."""

    records: int
    """That the data has."""
    how: str
    journalled: bool
    """A sampler of the user's own draws, so every epoch has an `EpochDrawn`."""


class EpochDrawn(LedgerEntry, frozen=True, tag="Drawn"):
    """What a sampler of the user's own gave for an epoch; the same whenever it is asked."""

    epoch: int
    digest: str


AnyEntry = (
    Opened
    | Committed
    | SettingsChanged
    | StepSkipped
    | Rewound
    | Computing
    | SampledEpochs
    | EpochDrawn
)


# ---- the file


class Ledger:
    """Appends to ledger.jsonl, one write per entry. Whatever goes wrong is raised."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: IO[bytes] = open(path, "ab", buffering=0)  # noqa: SIM115 (closed by close)
        self._heal()
        sync_folder(path.parent)

    def write(self, entry: AnyEntry, durable: bool = False) -> None:
        """If `durable`, it and all before it are on disk when this returns."""
        line = msgspec.json.encode(entry) + b"\n"
        if not self.whole:
            self._heal()
        self.whole = False
        with naming(self.path):
            if self.file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.whole = True
        if durable:
            self.sync()

    def sync(self) -> None:
        with naming(self.path):
            os.fsync(self.file.fileno())

    def close(self) -> None:
        self.file.close()

    def _heal(self) -> None:
        """Remove a line that was cut off; left there it would be a damaged line in the middle."""
        self.file.truncate(self.path.read_bytes().rfind(b"\n") + 1)
        self.whole = True


class Book:
    """What the driver writes while training: the range that is open, and where it began."""

    def __init__(self, ledger: Ledger, opened: Opened) -> None:
        self.ledger, self.opened = ledger, opened
        self.range: Committed | None = None
        self.changes: list[SettingsChanged] = []
        self.kernels: list[Kernels] = []
        """Those that computed last, as far as they are known."""
        self.drawn: dict[int, str] = {}
        """By epoch: the digest of what a sampler gave."""

    def computed_by(self, step: int, kernels: list[Kernels]) -> None:
        """From `step` on these compute."""
        if kernels and kernels != self.kernels:
            self.kernels = kernels
            self.ledger.write(Computing(step, kernels))

    def draw(self, step: int, digest: str) -> int | None:
        """A worker has drawn the epoch of `step`. The epoch, if it is not what was drawn before."""
        epoch = cut(step, **self.opened.shape).epoch
        if epoch not in self.drawn:
            self.drawn[epoch] = digest
            self.ledger.write(EpochDrawn(epoch, digest))
        return epoch if self.drawn[epoch] != digest else None

    def change(self, step: int, settings: dict[str, Any]) -> None:
        """Settings are in force from `step` on; durable on return."""
        self.changes.append(SettingsChanged(step, settings))
        self.ledger.write(self.changes[-1], durable=True)

    def skip(self, step: int, why: str) -> None:
        self.ledger.write(StepSkipped(step, why))

    def begin(self, step: int, generation: int, workers: list[int], speeds: list[float]) -> None:
        """A view is in force; the one before it did everything up to `step`, or was all lost."""
        self.close_at(step, [], None)
        if self.range is not None and step < self.range.first:
            self.ledger.write(Rewound(step))
            for change in self.changes:  # they will be in force again, at their steps
                if change.step > step:
                    self.ledger.write(change)
            self.ledger.sync()
        self.range = Committed(step, step, [], generation, workers, speeds, [], None)

    def close_at(
        self, step: int, rates: list[float | None], loss: float | None, *, durable: bool = False
    ) -> None:
        """Steps up to `step` are done."""
        if self.range is None:
            return
        if step > self.range.first:
            runs = runs_of(self.range.first, step, **self.opened.shape)
            done = msgspec.structs.replace(self.range, stop=step, runs=runs, rates=rates, loss=loss)
            self.ledger.write(done)
            self.range = msgspec.structs.replace(self.range, first=step)
        if durable:
            self.ledger.sync()


def new_book(
    path: Path,
    opened: Opened,
    changes: Mapping[int, dict[str, Any]],
    sampled: SampledEpochs | None = None,
) -> Book:
    """For a run that begins; `changes`, by step, are those of a run that it replays."""
    ledger = Ledger(path)
    ledger.write(opened, durable=True)
    if sampled is not None:
        ledger.write(sampled, durable=True)
    book = Book(ledger, opened)
    book.changes = [SettingsChanged(step, settings) for step, settings in changes.items()]
    return book


def old_book(
    path: Path,
    opened: Opened,
    step: int,
    given: frozenset[str],
    sampled: SampledEpochs | None = None,
) -> tuple[Book, int]:
    """For a run that goes on after `step` steps; and the number of its next worker.

    Workers are numbered for the life of a run. Settings `given` now win over earlier changes.
    """
    entries = read(path)
    before = opening(entries)
    for was, now in ((before, opened), (sampling(entries), sampled)):
        if was != now:
            raise RunDirError(
                f"{path.parent} was begun with {was or opened}, but now there are "
                f"{now or opened}: its ledger cannot be gone on with. Start a new run with "
                "train.start_from instead."
            )
    ledger = Ledger(path)
    ledger.write(Rewound(step))
    again = [c for c in changes_after(entries, 0) if c.step <= step or not _was_heard(c)]
    for change in again:  # they will be in force again, at their steps
        if change.step > step:
            ledger.write(change)
    ledger.sync()
    numbers = [n for e in entries if isinstance(e, Committed) for n in e.workers]
    book = Book(ledger, opened)
    book.kernels, book.drawn = computing_at(entries, step), drawn(entries)
    book.changes = [
        SettingsChanged(c.step, {k: v for k, v in c.settings.items() if k not in given})
        for c in again
    ]
    return book, max(numbers, default=-1) + 1


def _was_heard(change: SettingsChanged) -> bool:
    """Scores that schedules heard: after a resume they are computed again."""
    return HEARD_SCORE in change.settings


def read(path: Path) -> list[AnyEntry]:
    """All entries, so that entry i is line i + 1. Only a cut-off last line is passed over."""
    try:
        *lines, _ = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        raise RunDirError(f"{path} does not exist: this run has not kept a ledger.") from None
    decoder = msgspec.json.Decoder(AnyEntry)
    entries: list[AnyEntry] = []
    for number, line in enumerate(lines, 1):
        try:
            entries.append(decoder.decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RunDirError(
                f"{path}, line {number} is damaged ({error}), and a crash can only cut off the "
                "last one. Restore the file from a copy; without that line it proves nothing."
            ) from None
    return entries


# ---- what the lines say


def opening(entries: Sequence[AnyEntry]) -> Opened:
    """The shape of the run."""
    first = entries[0] if entries else None
    if not isinstance(first, Opened):
        raise RunDirError(f"line 1: a ledger begins with Opened, this one with {first}.")
    if min(first.records, first.batch, first.micro_batch) < 1:
        raise RunDirError(f"line 1: records, batch and micro_batch must be at least 1: {first}.")
    return first


def sampling(entries: Sequence[AnyEntry]) -> SampledEpochs | None:
    """What stands at a position; None: every record at one of them."""
    return next((entry for entry in entries if isinstance(entry, SampledEpochs)), None)


def drawn(entries: Sequence[AnyEntry]) -> dict[int, str]:
    """By epoch: the digest of what a sampler gave, whatever was rewound since."""
    return {entry.epoch: entry.digest for entry in entries if isinstance(entry, EpochDrawn)}


def runs_of(
    first: int,
    stop: int,
    *,
    records: int,
    batch: int,
    micro_batch: int,
    phases: Phases | None = None,
) -> list[EpochStretch]:
    """What steps [first, stop) consume: one run for each epoch they touch. With phases that share
    their batches, that is what no step before them has read."""
    if phases is not None:
        first, stop = phases.batches_before(first), phases.batches_before(stop)
    if stop <= first:
        return []
    begin = cut(first, records=records, batch=batch, micro_batch=micro_batch)
    end = cut(stop - 1, records=records, batch=batch, micro_batch=micro_batch)
    runs: list[EpochStretch] = [(epoch, 0, records) for epoch in range(begin.epoch, end.epoch + 1)]
    runs[-1] = (end.epoch, 0, end.stop)
    runs[0] = (begin.epoch, begin.start, runs[0][2])
    return runs


def surviving(entries: Sequence[AnyEntry]) -> list[Committed]:
    """The committed ranges that no rewind made void; one that a rewind hit is cut there."""
    return [committed for _, committed in numbered(entries)]


def numbered(entries: Sequence[AnyEntry]) -> list[tuple[int, Committed]]:
    """`surviving`, with line numbers."""
    line: list[tuple[int, Committed]] = []
    for number, entry in enumerate(entries, 1):
        if isinstance(entry, Committed):
            line.append((number, entry))
        elif isinstance(entry, Rewound):
            opened = opening(entries)
            line = [(n, _cut_at(entry.step, c, opened)) for n, c in line if c.first < entry.step]
    return line


def skipped(entries: Sequence[AnyEntry]) -> list[int]:
    """Steps that changed nothing, those aside that a rewind made void; whoever takes over may
    have told of one again."""
    steps: set[int] = set()
    for entry in entries:
        if isinstance(entry, StepSkipped):
            steps.add(entry.step)
        elif isinstance(entry, Rewound):
            steps = {step for step in steps if step < entry.step}
    return sorted(steps)


def computing_at(entries: Sequence[AnyEntry], step: int) -> list[Kernels]:
    """What computed the step before `step`; empty when nobody wrote it down."""
    found: list[Computing] = []
    for entry in entries:
        if isinstance(entry, Computing):
            found.append(entry)
        elif isinstance(entry, Rewound):
            found = [computing for computing in found if computing.step < entry.step]
    before = [computing for computing in found if computing.step < max(1, step)]
    return before[-1].kernels if before else []


def changes_of(entries: Sequence[AnyEntry]) -> list[SettingsChanged]:
    """Those that no rewind made void, in order."""
    changes: list[SettingsChanged] = []
    for entry in entries:
        if isinstance(entry, SettingsChanged):
            changes.append(entry)
        elif isinstance(entry, Rewound):
            changes = [change for change in changes if change.step <= entry.step]
    return changes


def changes_after(entries: Sequence[AnyEntry], step: int) -> list[SettingsChanged]:
    """The changes in force from `step` on or later that no rewind made void, in order.

    Once `Rewound(step)` is written these are the ones at exactly `step`. A checkpoint may hold
    them already, so applying one twice must be the same as once. Before it is written, these are
    also the later ones, for a resume that wants to journal them again.
    """
    return [change for change in changes_of(entries) if change.step >= step]


def changes_by_step(entries: Sequence[AnyEntry]) -> dict[int, dict[str, Any]]:
    """All changes that no rewind made void: after so many steps → what changed then."""
    return journal_of(changes_of(entries))


def journal_of(changes: Sequence[SettingsChanged]) -> dict[int, dict[str, Any]]:
    journal: dict[int, dict[str, Any]] = {}
    for change in changes:
        journal.setdefault(change.step, {}).update(change.settings)
    return journal


def _cut_at(step: int, entry: Committed, opened: Opened) -> Committed:
    """The steps of it before `step`, and what it says that they consumed."""
    if entry.stop <= step:
        return entry
    left = _place(step, opened) - _place(entry.first, opened)
    runs: list[EpochStretch] = []
    for epoch, start, stop in entry.runs:
        if left > 0:
            runs.append((epoch, start, min(stop, start + left)))
            left -= stop - start
    return msgspec.structs.replace(entry, stop=step, runs=runs, rates=[], loss=None)


def _place(step: int, opened: Opened) -> int:
    """How many records the steps before `step` consume."""
    number = opened.phases.batches_before(step) if opened.phases else step
    here = opened.batch_at(number)
    return here.epoch * opened.records + here.start
