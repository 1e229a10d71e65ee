# SPDX-License-Identifier: Apache-2.0
"""The proof that every record was consumed exactly once an epoch, whatever died on the way.

One JSON object a line in ledger.jsonl, oldest first. The invariant, which `check` judges from the
file alone: after the rewinds, the committed ranges of steps follow each other without gap or
overlap from step 0, what they consumed tiles epoch after epoch from position 0 to `records`, and
the deal of every step covers its micro-batches. Steps, epochs and positions count from 0; ranges
are half open. `rates`, `loss` and `seed` are testimony: nothing in the file contradicts them.

A line counts once its newline is there. What a crash cut off was never promised, so it is not read
and the next writer removes it.
"""

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec

from manyhands.deal import cut, deal, steps_per_epoch
from manyhands.errors import RunDirError
from manyhands.rundir import sync_folder

Run = tuple[int, int, int]
"""Positions [start, stop) of one epoch, as (epoch, start, stop)."""


class Entry(msgspec.Struct, frozen=True, tag_field="entry", tag=True): ...


class Opened(Entry, frozen=True):
    """The first line: the shape of the run, the same for life."""

    records: int
    batch: int
    micro_batch: int
    seed: int

    @property
    def shape(self) -> dict[str, int]:
        """The keywords of `cut` and `runs_of`."""
        return {"records": self.records, "batch": self.batch, "micro_batch": self.micro_batch}


class Committed(Entry, frozen=True):
    """Steps [first, stop) are done, by the members of one view."""

    first: int
    stop: int
    runs: list[Run]
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


class Changed(Entry, frozen=True):
    """From step `step` on these settings are in force."""

    step: int
    settings: dict[str, Any]


class Rewound(Entry, frozen=True):
    """The run went back to having done `step` steps: steps >= it are void, and changes > it.

    A change in force from exactly `step` stays: it was made when those steps were done, so the
    checkpoint may or may not hold it. Whoever resumes applies `changes_after(entries, step)`.
    """

    step: int


AnyEntry = Opened | Committed | Changed | Rewound


class Share(msgspec.Struct, frozen=True):
    """What one worker did."""

    steps: int = 0
    """In whose view it was a member, dealt something or not."""
    micro_batches: int = 0
    records: int = 0


class Epoch(msgspec.Struct, frozen=True):
    epoch: int
    consumed: int
    of: int


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """What the surviving line comes to. It proves something only if there are no problems."""

    problems: list[str]
    steps: int = 0
    epochs: list[Epoch] = []
    by_worker: dict[int, Share] = {}
    """Lines that have a problem of their own are left out."""
    rewinds: list[int] = []
    """The steps that the run went back to, in order."""
    changes: list[Changed] = []
    """Those that were not made void."""

    @property
    def ok(self) -> bool:
        return not self.problems


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
        written = self.file.write(line)
        if written != len(line):
            raise OSError(f"{self.path}: {written} of {len(line)} bytes written; is the disk full?")
        self.whole = True
        if durable:
            self.sync()

    def sync(self) -> None:
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
        self.changes: list[Changed] = []

    def change(self, step: int, settings: dict[str, Any]) -> None:
        """Settings are in force from `step` on; durable on return."""
        self.changes.append(Changed(step, settings))
        self.ledger.write(self.changes[-1], durable=True)

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


def runs_of(first: int, stop: int, *, records: int, batch: int, micro_batch: int) -> list[Run]:
    """What steps [first, stop) read: one run for each epoch they touch."""
    if stop <= first:
        return []
    begin = cut(first, records=records, batch=batch, micro_batch=micro_batch)
    end = cut(stop - 1, records=records, batch=batch, micro_batch=micro_batch)
    runs: list[Run] = [(epoch, 0, records) for epoch in range(begin.epoch, end.epoch + 1)]
    runs[-1] = (end.epoch, 0, end.stop)
    runs[0] = (begin.epoch, begin.start, runs[0][2])
    return runs


def surviving(entries: Sequence[AnyEntry]) -> list[Committed]:
    """The committed ranges that no rewind made void; one that a rewind hit is cut there."""
    return [committed for _, committed in _numbered(entries)]


def changes_after(entries: Sequence[AnyEntry], step: int) -> list[Changed]:
    """The changes in force from `step` on or later that no rewind made void, in order.

    Once `Rewound(step)` is written these are the ones at exactly `step`. A checkpoint may hold
    them already, so applying one twice must be the same as once. Before it is written, these are
    also the later ones, for a resume that wants to journal them again.
    """
    return [change for change in _changes(entries) if change.step >= step]


def changes_by_step(entries: Sequence[AnyEntry]) -> dict[int, dict[str, Any]]:
    """All changes that no rewind made void: after so many steps → what changed then."""
    return journal_of(_changes(entries))


def journal_of(changes: Sequence[Changed]) -> dict[int, dict[str, Any]]:
    journal: dict[int, dict[str, Any]] = {}
    for change in changes:
        journal.setdefault(change.step, {}).update(change.settings)
    return journal


def check(entries: Sequence[AnyEntry]) -> Proof:
    """Judge the whole file: each line alone, line after line, and what the survivors consumed."""
    try:
        opened = opening(entries)
    except RunDirError as error:
        return Proof(problems=[str(error)])
    alone = [
        (line, text)
        for line, entry in enumerate(entries, 1)
        if isinstance(entry, Committed)
        for text in _alone(entry, opened)
    ]
    wrong, survivors = {line for line, _ in alone}, _numbered(entries)
    found = [*alone, *_sequence(entries), *_tiling(survivors, opened.records)]
    consumed: dict[int, int] = {}
    for epoch, start, stop in (run for _, committed in survivors for run in committed.runs):
        consumed[epoch] = consumed.get(epoch, 0) + stop - start
    return Proof(
        problems=[f"line {line}: {text}" for line, text in sorted(found, key=lambda f: f[0])],
        steps=survivors[-1][1].stop if survivors else 0,
        epochs=[Epoch(epoch, n, opened.records) for epoch, n in sorted(consumed.items())],
        by_worker=_shares([c for line, c in survivors if line not in wrong], opened),
        rewinds=[entry.step for entry in entries if isinstance(entry, Rewound)],
        changes=_changes(entries),
    )


# ---- the parts of the check; problems are (line, text)


def _alone(entry: Committed, opened: Opened) -> Iterator[str]:
    """What is wrong with a range by itself."""
    first, stop, workers, speeds = entry.first, entry.stop, entry.workers, entry.speeds
    if not 0 <= first < stop:
        yield f"steps [{first}, {stop}) are no range."
        return
    per_epoch = steps_per_epoch(opened.records, opened.batch)
    touched = (stop - 1) // per_epoch - first // per_epoch + 1
    if len(entry.runs) != touched:  # said before listing them: a damaged `stop` may be enormous
        yield f"steps [{first}, {stop}) touch {touched} epochs, but it has {len(entry.runs)} runs."
    else:
        for run, due in zip(entry.runs, runs_of(first, stop, **opened.shape), strict=True):
            if run != due:
                yield f"steps [{first}, {stop}) read {_say(due)}, but it says {_say(run)}."
    if entry.generation < 1:
        yield f"view {entry.generation}, but the first view is 1."
    if not workers or min(workers) < 0 or len(set(workers)) < len(workers):
        yield f"workers {workers} are not one distinct number for each rank."
    elif len(workers) != len(speeds):
        yield f"{len(workers)} workers, but {len(speeds)} speeds."
    elif not all(0 < speed < math.inf for speed in speeds):
        yield f"speeds {speeds} are not all positive numbers."
    else:
        for _, sizes in _shapes(first, stop, opened):
            yield from _dealing(len(sizes), speeds)


def _dealing(micro_batches: int, speeds: list[float]) -> Iterator[str]:
    try:
        ranges = deal(micro_batches, tuple(speeds))
    except (ArithmeticError, LookupError, ValueError) as error:
        yield f"{micro_batches} micro-batches cannot be dealt to speeds {speeds} ({error!r})."
        return
    if [i for mine in ranges for i in mine] != list(range(micro_batches)):
        dealt = ", ".join(f"[{r.start}, {r.stop})" for r in ranges)
        yield f"the deal {dealt} does not cover {micro_batches} micro-batches once."


def _sequence(entries: Sequence[AnyEntry]) -> Iterator[tuple[int, str]]:
    """What is wrong with how lines follow each other."""
    done, before = 0, None
    for line, entry in enumerate(entries, 1):
        match entry:
            case Opened():
                if line > 1:
                    yield line, "a second Opened; a run has one shape for life."
            case Changed(step):
                if step < done:
                    yield line, f"a change from step {step} on, but {done} steps were done by then."
            case Rewound(step):
                if not 0 <= step <= done:
                    yield line, f"a rewind to step {step}, but only {done} steps were done."
                done, before = max(0, min(step, done)), None  # a resumed run counts views anew
            case Committed(first, stop):
                if first > done:
                    yield line, f"steps [{done}, {first}) are missing before [{first}, {stop})."
                elif first < done:
                    again = f"[{first}, {min(stop, done)})"
                    yield line, f"steps {again} are committed again; {done} were done."
                if before and (text := _views(before, entry)):
                    yield line, text
                done, before = stop, entry


def _views(before: Committed, after: Committed) -> str | None:
    """Views count up, and one view has the same members and the same deal throughout."""
    if after.generation < before.generation:
        return f"view {after.generation} comes after view {before.generation}."
    was, now = ((c.workers, c.speeds) for c in (before, after))
    if after.generation == before.generation and was != now:
        return f"(workers, speeds) of view {after.generation} are {now}, were {was}."
    return None


def _tiling(survivors: list[tuple[int, Committed]], records: int) -> Iterator[tuple[int, str]]:
    """What is wrong with the positions themselves. Knows nothing of steps, batches or views."""
    epoch, position = 0, 0
    for line, committed in survivors:
        for run in committed.runs:
            if not (run[0] >= 0 and 0 <= run[1] < run[2] <= records):
                yield line, f"{_say(run)} are not inside an epoch of {records} records."
                continue
            if run[:2] != (epoch, position):
                what = "consumed again" if run[:2] < (epoch, position) else "consumed too early"
                due = f"position {position} of epoch {epoch} was next"
                yield line, f"{_say(run)} were {what}: {due}."
            epoch, position = (run[0], run[2]) if run[2] < records else (run[0] + 1, 0)


def _numbered(entries: Sequence[AnyEntry]) -> list[tuple[int, Committed]]:
    """`surviving`, with line numbers."""
    line: list[tuple[int, Committed]] = []
    for number, entry in enumerate(entries, 1):
        if isinstance(entry, Committed):
            line.append((number, entry))
        elif isinstance(entry, Rewound):
            opened = opening(entries)
            line = [(n, _cut_at(entry.step, c, opened)) for n, c in line if c.first < entry.step]
    return line


def _cut_at(step: int, entry: Committed, opened: Opened) -> Committed:
    """The steps of it before `step`, and what it says that they consumed."""
    if entry.stop <= step:
        return entry
    left = _place(step, opened) - _place(entry.first, opened)
    runs: list[Run] = []
    for epoch, start, stop in entry.runs:
        if left > 0:
            runs.append((epoch, start, min(stop, start + left)))
            left -= stop - start
    return msgspec.structs.replace(entry, stop=step, runs=runs, rates=[], loss=None)


def _changes(entries: Sequence[AnyEntry]) -> list[Changed]:
    changes: list[Changed] = []
    for entry in entries:
        if isinstance(entry, Changed):
            changes.append(entry)
        elif isinstance(entry, Rewound):
            changes = [change for change in changes if change.step <= entry.step]
    return changes


def _shares(line: Sequence[Committed], opened: Opened) -> dict[int, Share]:
    """Who did how much. Counted per shape of step, of which there are two, not per step."""
    totals: dict[int, Share] = {}
    for entry in line:
        for count, sizes in _shapes(entry.first, entry.stop, opened):
            ranges = deal(len(sizes), tuple(entry.speeds))
            for worker, mine in zip(entry.workers, ranges, strict=True):
                old = totals.get(worker, Share())
                totals[worker] = Share(
                    old.steps + count,
                    old.micro_batches + count * len(mine),
                    old.records + count * sum(sizes[mine.start : mine.stop]),
                )
    return dict(sorted(totals.items()))


def _shapes(first: int, stop: int, opened: Opened) -> Iterator[tuple[int, tuple[int, ...]]]:
    """How many of steps [first, stop) have which micro-batches: last steps of an epoch, others."""
    per_epoch = steps_per_epoch(opened.records, opened.batch)
    last = stop // per_epoch - first // per_epoch
    for count, step in ((stop - first - last, 0), (last, per_epoch - 1)):
        if count:
            yield count, cut(step, **opened.shape).sizes


def _place(step: int, opened: Opened) -> int:
    """How many records the steps before `step` consume."""
    here = cut(step, **opened.shape)
    return here.epoch * opened.records + here.start


def _say(run: Run) -> str:
    return f"positions [{run[1]}, {run[2]}) of epoch {run[0]}"
