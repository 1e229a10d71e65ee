# SPDX-License-Identifier: Apache-2.0
"""The lines of a ledger, and what they say: pure functions of all of them.

Steps, epochs and positions count from 0; ranges are half open.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec

from manyhands.accounting.deal_micro_batches import ENDLESS, Cut, cut
from manyhands.accounting.merged_steps import added
from manyhands.accounting.phases import Phases
from manyhands.accounting.read_digests import unrolled
from manyhands.values.errors import RunDirError
from manyhands.values.kernels import Kernels

EpochStretch = tuple[int, int, int]
"""Positions [start, stop) of one epoch, as (epoch, start, stop)."""


ComputedBy = list[tuple[int, int, int]]
"""By rank: steps, micro-batches, records."""


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


class Committed(LedgerEntry, frozen=True, omit_defaults=True):
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
    had: list[int] = []
    """Where workers are at different steps: which were in before these (merged_steps.py), ..."""
    has: list[int] = []
    """... and after them."""
    computed: ComputedBy | None = None
    """There, by rank: steps, micro-batches and records; empty when it is not known. None: members
    took each step together."""


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


class StreamRead(LedgerEntry, frozen=True, tag="Read"):
    """What a stream gave for the steps from `first` on: a digest each, of 12 letters."""

    first: int
    digests: str


AnyEntry = (
    Opened
    | Committed
    | SettingsChanged
    | StepSkipped
    | Rewound
    | Computing
    | SampledEpochs
    | EpochDrawn
    | StreamRead
)


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


def read_from(entries: Sequence[AnyEntry], step: int = 0) -> dict[int, int]:
    """By step, from `step` on: the digest of what a stream gave, whatever was rewound since."""
    found: dict[int, int] = {}
    for entry in entries:
        if isinstance(entry, StreamRead):
            with suppress(ValueError):  # a damaged line, which the proof names
                for at, digest in unrolled(entry.first, entry.digests).items():
                    if at >= step:
                        found.setdefault(at, digest)
    return found


def records_of(opened: Opened, step: int) -> str:
    """Which records of a stream a step reads, for people."""
    here = cut(step, **opened.shape)
    epoch = "" if opened.records == ENDLESS else f" of epoch {here.epoch}"
    return f"records {here.start} to {here.stop - 1}{epoch}"


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


def read_by(entry: Committed, opened: Opened) -> list[EpochStretch]:
    """What the steps of a line read."""
    runs: list[EpochStretch] = []
    for first, stop in added(entry.had, entry.first, entry.has, entry.stop):
        for run in runs_of(first, stop, **opened.shape):
            if runs and runs[-1][0] == run[0] and runs[-1][2] == run[1]:
                runs[-1] = (run[0], runs[-1][1], run[2])
            else:
                runs.append(run)
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
    if entry.computed is not None:  # a run goes back to where all steps before were in
        whole = msgspec.structs.replace(entry, stop=step, has=[], rates=[], loss=None, computed=[])
        return msgspec.structs.replace(whole, runs=read_by(whole, opened))
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
