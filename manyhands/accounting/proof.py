# SPDX-License-Identifier: Apache-2.0
"""The proof that every record was consumed exactly once an epoch, whatever died on the way.

The invariant, which `check` judges from the ledger alone: after the rewinds, the committed ranges
of steps follow each other without gap or overlap from step 0, what they consumed tiles epoch after
epoch from position 0 to `records`, and the deal of every step covers its micro-batches. `rates`,
`loss` and `seed` are testimony: nothing in the file contradicts them. Where records are drawn by a
sampler, positions are what is consumed once; a sampler of the user's own gave one list per epoch.
"""

import math
from collections.abc import Iterator, Sequence

import msgspec

from manyhands.accounting.deal_micro_batches import deal, steps_per_epoch
from manyhands.accounting.ledger_lines import (
    AnyEntry,
    Committed,
    ComputedBy,
    Computing,
    EpochDrawn,
    EpochStretch,
    Opened,
    Rewound,
    SampledEpochs,
    SettingsChanged,
    StepSkipped,
    StreamRead,
    changes_of,
    drawn,
    numbered,
    opening,
    read_by,
    runs_of,
    sampling,
    skipped,
)
from manyhands.accounting.merged_steps import added, problem_with
from manyhands.accounting.read_digests import unrolled
from manyhands.values.errors import RunDirError

MOST_TOUCHED = 1 << 20
"""Epochs that a line may touch where its steps are listed one by one."""


class Share(msgspec.Struct, frozen=True):
    """What one worker did."""

    steps: int = 0
    """In whose view it was a member, dealt something or not; where workers are at different steps,
    those that it computed."""
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
    changes: list[SettingsChanged] = []
    """Those that were not made void."""
    skipped: list[int] = []
    """Steps that changed nothing, because something in them was not finite."""
    sampled: SampledEpochs | None = None
    """What stands at a position, where it is not every record at one of them."""

    @property
    def ok(self) -> bool:
        return not self.problems


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
    wrong, survivors = {line for line, _ in alone}, numbered(entries)
    found = [*alone, *_sequence(entries), *_tiling(survivors, opened.records)]
    found += [*_drawing(entries), *_undrawn(entries, survivors), *_reading(entries)]
    consumed: dict[int, int] = {}
    for epoch, start, stop in (run for _, committed in survivors for run in committed.runs):
        consumed[epoch] = consumed.get(epoch, 0) + stop - start
    return Proof(
        problems=[f"line {line}: {text}" for line, text in sorted(found, key=lambda f: f[0])],
        steps=survivors[-1][1].stop if survivors else 0,
        epochs=[Epoch(epoch, n, opened.records) for epoch, n in sorted(consumed.items())],
        by_worker=_shares([c for line, c in survivors if line not in wrong], opened),
        rewinds=[entry.step for entry in entries if isinstance(entry, Rewound)],
        changes=changes_of(entries),
        skipped=skipped(entries),
        sampled=sampling(entries),
    )


# ---- the parts of the check; problems are (line, text)


def _alone(entry: Committed, opened: Opened) -> Iterator[str]:
    """What is wrong with a range by itself."""
    first, stop, workers, speeds = entry.first, entry.stop, entry.workers, entry.speeds
    if not 0 <= first < stop:
        yield f"steps [{first}, {stop}) are no range."
        return
    if entry.computed is not None:
        yield from _of_pushes(entry, entry.computed, opened)
        return
    touched = _epochs_touched(first, stop, opened)
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
    elif not all(0 <= speed < math.inf for speed in speeds) or not any(speeds):
        yield f"speeds {speeds} are not all numbers, of which one at least is positive."
    else:
        for _, sizes in _shapes(first, stop, opened):
            yield from _dealing(len(sizes), speeds)


def _of_pushes(entry: Committed, computed: ComputedBy, opened: Opened) -> Iterator[str]:
    """The same, where workers are at different steps: as many steps came in as pushes were made,
    none went, and what they read is what was read."""
    first, stop = entry.first, entry.stop
    for words, pushes in ((entry.had, first), (entry.has, stop)):
        if (text := problem_with(words, pushes)) is not None:
            yield text
            return
    if gone := added(entry.has, stop, entry.had, first):
        yield f"steps [{gone[0][0]}, {gone[0][1]}) were in before it, and are not after it."
    came = added(entry.had, first, entry.has, stop)
    touched = sum(_epochs_touched(a, b, opened) for a, b in came)
    if len(entry.runs) > touched:  # said before listing them: a damaged `stop` may be enormous
        yield f"its steps touch {touched} epochs, but it has {len(entry.runs)} runs."
    elif touched > MOST_TOUCHED or entry.runs != read_by(entry, opened):
        yield f"steps {came[:9]} did not read {[_say(run) for run in entry.runs[:9]]}."
    if entry.generation < 1:
        yield f"view {entry.generation}, but the first view is 1."
    workers = entry.workers
    if not workers or min(workers) < 0 or len(set(workers)) < len(workers):
        yield f"workers {workers} are not one distinct number for each rank."
    elif computed and len(computed) != len(workers):
        yield f"{len(workers)} workers, but {len(computed)} who computed."
    elif computed:
        shapes = [shape for a, b in came for shape in _shapes(a, b, opened)]
        due = (
            sum(count for count, _ in shapes),
            sum(count * len(sizes) for count, sizes in shapes),
            sum(count * sum(sizes) for count, sizes in shapes),
        )
        told = tuple(sum(column) for column in zip(*computed, strict=True))
        if told != due:
            yield f"(steps, micro-batches, records) are {due}, but {told} were computed."


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
            case SettingsChanged(step):
                if step < done:
                    yield line, f"a change from step {step} on, but {done} steps were done by then."
            case Rewound(step):
                if not 0 <= step <= done:
                    yield line, f"a rewind to step {step}, but only {done} steps were done."
                done, before = max(0, min(step, done)), None  # a resumed run counts views anew
            case Computing():
                pass  # testimony
            case SampledEpochs():
                if line != 2:
                    yield line, "what an epoch's positions are is said in line 2, once and for all."
            case EpochDrawn():
                pass  # see `_drawing`
            case StreamRead():
                pass  # see `_reading`
            case Committed(first, stop):
                if first > done:
                    yield line, f"steps [{done}, {first}) are missing before [{first}, {stop})."
                elif first < done:
                    again = f"[{first}, {min(stop, done)})"
                    yield line, f"steps {again} are committed again; {done} were done."
                if before and (text := _views(before, entry)):
                    yield line, text
                if entry.had != (had := before.has if before else []):
                    yield line, f"steps {entry.had} were in before it, it says; it was {had}."
                done, before = stop, entry
            case StepSkipped():  # the records of its step are in a committed range
                pass


def _drawing(entries: Sequence[AnyEntry]) -> Iterator[tuple[int, str]]:
    """An epoch that was drawn again was drawn alike."""
    first: dict[int, tuple[int, str]] = {}
    for line, entry in enumerate(entries, 1):
        if isinstance(entry, EpochDrawn):
            before, digest = first.setdefault(entry.epoch, (line, entry.digest))
            if digest != entry.digest:
                yield line, f"epoch {entry.epoch} was drawn otherwise than in line {before}."


def _reading(entries: Sequence[AnyEntry]) -> Iterator[tuple[int, str]]:
    """A step that a stream was read for again was given the same."""
    first: dict[int, tuple[int, int]] = {}
    for line, entry in enumerate(entries, 1):
        if isinstance(entry, StreamRead):
            try:
                told = unrolled(entry.first, entry.digests)
            except ValueError as error:
                yield line, f"{error}."
                continue
            for step, digest in told.items():
                before, was = first.setdefault(step, (line, digest))
                if was != digest:
                    yield line, f"the stream gave step {step} other records than in line {before}."
                    break


def _undrawn(
    entries: Sequence[AnyEntry], survivors: list[tuple[int, Committed]]
) -> Iterator[tuple[int, str]]:
    """Every epoch that was consumed has been drawn, where a sampler draws it."""
    sampled, known = sampling(entries), drawn(entries)
    if sampled is None or not sampled.journalled:
        return
    for line, committed in survivors:
        for epoch, _, _ in committed.runs:
            if epoch not in known:
                yield line, f"nothing says what the sampler gave for epoch {epoch}."


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
    ahead: list[EpochStretch] = []
    """Consumed beyond the first that was not, where workers are at different steps."""
    for line, committed in survivors:
        for run in committed.runs:
            if not (run[0] >= 0 and 0 <= run[1] < run[2] <= records):
                yield line, f"{_say(run)} are not inside an epoch of {records} records."
                continue
            if run[:2] > (epoch, position) and committed.computed is not None:
                if any(r[0] == run[0] and r[1] < run[2] and run[1] < r[2] for r in ahead):
                    yield line, f"{_say(run)} were consumed again."
                ahead.append(run)
                continue
            if run[:2] != (epoch, position):
                what = "consumed again" if run[:2] < (epoch, position) else "consumed too early"
                due = f"position {position} of epoch {epoch} was next"
                yield line, f"{_say(run)} were {what}: {due}."
            epoch, position = (run[0], run[2]) if run[2] < records else (run[0] + 1, 0)
            while (
                then := next((r for r in ahead if r[:2] == (epoch, position)), None)
            ) is not None:
                ahead.remove(then)
                epoch, position = (then[0], then[2]) if then[2] < records else (then[0] + 1, 0)
        if ahead and not committed.has:
            yield line, f"all before it are in, it says, but position {position} of epoch {epoch}."
            ahead.clear()


def _shares(line: Sequence[Committed], opened: Opened) -> dict[int, Share]:
    """Who did how much. Counted per shape of step, of which there are two, not per step."""
    totals: dict[int, Share] = {}
    for entry in line:
        if entry.computed is not None:
            for worker, (steps, leaves, records) in zip(
                entry.workers, entry.computed, strict=False
            ):
                old = totals.get(worker, Share())
                totals[worker] = Share(
                    old.steps + steps, old.micro_batches + leaves, old.records + records
                )
            continue
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
    last = _last_of_epochs(stop, opened) - _last_of_epochs(first, opened)
    for count, batch in ((stop - first - last, 0), (last, per_epoch - 1)):
        if count:
            yield count, opened.batch_at(batch).sizes


def _last_of_epochs(step: int, opened: Opened) -> int:
    """How many of the steps before `step` read the last batch of an epoch."""
    per_epoch, phases = steps_per_epoch(opened.records, opened.batch), opened.phases
    if phases is None:
        return step // per_epoch
    epochs = range(phases.batches_before(step) // per_epoch + 1)
    ends = ((phases.steps_before((e + 1) * per_epoch - i) for i in (1, 0)) for e in epochs)
    return sum(max(0, min(step, stop) - first) for first, stop in ends)


def _epochs_touched(first: int, stop: int, opened: Opened) -> int:
    """By what steps [first, stop) consume."""
    if opened.phases is not None:
        first, stop = (opened.phases.batches_before(step) for step in (first, stop))
    per_epoch = steps_per_epoch(opened.records, opened.batch)
    return (stop - 1) // per_epoch - first // per_epoch + 1 if stop > first else 0


def _say(run: EpochStretch) -> str:
    return f"positions [{run[1]}, {run[2]}) of epoch {run[0]}"
