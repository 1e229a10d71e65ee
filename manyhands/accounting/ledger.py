# SPDX-License-Identifier: Apache-2.0
"""What a run did, written down: which steps, what they consumed, by whom, and what changed.

One JSON object a line in ledger.jsonl, oldest first. Steps, epochs and positions count from 0;
ranges are half open. The file alone proves that nothing was lost or done twice (proof.py).

A line counts once its newline is there. What a crash cut off was never promised, so it is not read
and the next writer removes it.
"""

import errno
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import msgspec

from manyhands.accounting.deal_micro_batches import cut
from manyhands.accounting.ledger_lines import (
    AnyEntry,
    Committed,
    ComputedBy,
    Computing,
    EpochDrawn,
    Opened,
    Rewound,
    SampledEpochs,
    SettingsChanged,
    StepSkipped,
    StreamRead,
    changes_after,
    computing_at,
    drawn,
    opening,
    read_by,
    read_from,
    sampling,
)
from manyhands.accounting.merged_steps import words_of
from manyhands.accounting.read_digests import KEPT, stretches
from manyhands.values.config import HEARD_SCORE
from manyhands.values.errors import RunDirError
from manyhands.values.kernels import Kernels
from manyhands.values.run_folder import naming, sync_folder

AT_ONCE = 4096
"""Digests of a stream in a line, at the most."""

FEW_BEFORE = 64
"""Steps before the one that a run goes on with, some of which are read again: they are compared."""


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
        self.last_loss: float | None = None
        """Of the step after which a run goes on."""
        self.drawn: dict[int, str] = {}
        """By epoch: the digest of what a sampler gave."""
        self.reads: dict[int, int] = {}
        """By step, of the last ones: the digest of what a stream gave."""
        self.unwritten: dict[int, int] = {}
        """Of them, those that are not in the file yet."""
        self._merged: dict[int, tuple[int, list[int], ComputedBy]] = {}
        """After so many pushes, where workers are at different steps: in which view, the steps that
        are in, and who computed how much since it began."""
        self._counted: ComputedBy | None = []
        """What was written down of that; None: that is not known."""
        self._merges = False

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

    def read(self, step: int, digest: int) -> bool:
        """A stream was read for `step`. Whether it gave what it gave before, if it did."""
        if step not in self.reads:
            self.reads[step] = self.unwritten[step] = digest
            if len(self.reads) > KEPT:
                del self.reads[next(iter(self.reads))]
            if len(self.unwritten) >= AT_ONCE:
                self._write_reads()
        return self.reads[step] == digest

    def _write_reads(self) -> None:
        for first, digests in stretches(self.unwritten):
            self.ledger.write(StreamRead(first, digests))
        self.unwritten.clear()

    def change(self, step: int, settings: dict[str, Any]) -> None:
        """Settings are in force from `step` on; durable on return."""
        self.changes.append(SettingsChanged(step, settings))
        self.ledger.write(self.changes[-1], durable=True)

    def skip(self, step: int, why: str) -> None:
        self.ledger.write(StepSkipped(step, why))

    def merge(self, step: int, generation: int, applied: list[int], computed: ComputedBy) -> None:
        """This is so after `step` pushes, of which the last were made in that view."""
        self._merged[step], self._merges = (generation, applied, computed), True

    def begin(self, step: int, generation: int, workers: list[int], speeds: list[float]) -> None:
        """A view is in force; the one before it did everything up to `step`, or was all lost."""
        self.close_at(step, [], None)
        if self.range is not None and step < self.range.first:
            self.ledger.write(Rewound(step))
            for change in self.changes:  # they will be in force again, at their steps
                if change.step > step:
                    self.ledger.write(change)
            self.ledger.sync()
        had = self._merged[step][1] if step in self._merged else []
        self.range = Committed(step, step, [], generation, workers, speeds, [], None, words_of(had))
        self._merged, self._counted = {}, []

    def close_at(
        self, step: int, rates: list[float | None], loss: float | None, *, durable: bool = False
    ) -> None:
        """Steps up to `step` are done."""
        if self.range is None:
            return
        if step > self.range.first:
            replace = msgspec.structs.replace
            done = replace(self._with_pushes(step), stop=step, rates=rates, loss=loss)
            self._write_reads()
            self.ledger.write(replace(done, runs=read_by(done, self.opened)))
            self.range = replace(self.range, first=step, had=done.has)
        if durable:
            self.ledger.sync()

    def _with_pushes(self, step: int) -> Committed:
        """The range, with which steps are in after `step` of them and who computed them."""
        assert self.range is not None
        if step not in self._merged:  # it was said by somebody who is gone, and not heard
            self._counted = None
            computed = [] if self._merges else None
            return msgspec.structs.replace(self.range, computed=computed)
        generation, applied, computed = self._merged[step]
        self._merged = {s: told for s, told in self._merged.items() if s >= step}
        mine: ComputedBy = []
        if generation == self.range.generation and self._counted is not None:
            before = self._counted or [(0, 0, 0)] * len(computed)
            mine = [
                (a - x, b - y, c - z) for (a, b, c), (x, y, z) in zip(computed, before, strict=True)
            ]
            self._counted = computed
        return msgspec.structs.replace(self.range, has=words_of(applied), computed=mine)


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
    # Scores that schedules heard are computed again, and are the same unless they are asked for
    # otherwise from here on.
    other = any(setting.startswith("evaluate.") for setting in given)
    again = [
        c
        for c in changes_after(entries, 0)
        if c.step <= step or HEARD_SCORE not in c.settings or not other
    ]
    for change in again:  # they will be in force again, at their steps
        if change.step > step:
            ledger.write(change)
    ledger.sync()
    numbers = [n for e in entries if isinstance(e, Committed) for n in e.workers]
    book = Book(ledger, opened)
    book.kernels, book.drawn = computing_at(entries, step), drawn(entries)
    ended = (e.loss for e in reversed(entries) if isinstance(e, Committed) and e.stop == step)
    book.last_loss = next(ended, None)
    book.reads = read_from(entries, max(0, step - FEW_BEFORE))
    book.changes = [
        SettingsChanged(c.step, {k: v for k, v in c.settings.items() if k not in given})
        for c in again
    ]
    return book, max(numbers, default=-1) + 1


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
