# SPDX-License-Identifier: Apache-2.0
"""Records that can only be read in sequence: an IterableDataset, a function that yields, whatever
can be iterated and has no length.

They are numbered as they come, and a micro-batch is the records whose numbers are its positions, so
any worker that reads the stream finds the same ones. What is kept is bounded: two batches, and the
window that is shuffled. Whoever needs what was passed already, or is far ahead, begins again: from
the nearest state that the stream itself gave (`state_dict`), or from its beginning, by skipping.

Where the number of records of a pass is known (`data.pass_records`), a pass is an epoch. Where it
is not, the stream is one epoch without end: when it ends it is read again, without a seam.

Random numbers that the stream's own code draws are seeded for each record by its number. That it
gives the same records each time it is read, nobody can promise but its author.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import msgspec
import torch.utils.data

from manyhands.accounting.deal_micro_batches import ENDLESS, Batch
from manyhands.data.columns.array_types import Positions
from manyhands.data.ordering.epoch_order import FIRST, Order, RecordVisit
from manyhands.data.ordering.stream_order import StreamOrder
from manyhands.data.reading.collate_items import Collate, collated
from manyhands.values.errors import TaskError
from manyhands.values.forked_children import one_process

STATE_EVERY = 64
"""Records between two states that are kept, at the least."""

MOST_STATE_BYTES = 1 << 20

SIGN_OF_LIFE = 1000
"""Records after which whoever waits for them hears that it goes on."""


class StreamState(NamedTuple):
    """Where a stream is, in its own words, before it gives record `number` of an epoch."""

    epoch: int
    number: int
    in_pass: tuple[int, int]
    """Which pass over it, and how many records of that were given."""
    own: Any


def is_stream(data: Any) -> bool:
    """Whether it can only be read in sequence."""
    if isinstance(data, torch.utils.data.IterableDataset):
        return True
    if hasattr(data, "__len__"):
        return False
    if inspect.isclass(data) or hasattr(data, "__getitem__"):
        return False
    return hasattr(data, "__iter__") or inspect.isfunction(data) or inspect.ismethod(data)


def refuse_used_up(data: Any, where: str) -> None:
    """What can be read once cannot be read by each worker, nor again."""
    if isinstance(data, Iterator):
        kind = type(cast("object", data)).__name__
        raise TaskError(
            f"Task: {where} is a {kind}, which can be read once. Every worker reads it, and again "
            f"after a failure: give the function that makes it ({where}=records, without "
            "calling it), or an object whose __iter__ begins anew."
        )


class StreamRecords:
    draws_randomness = True

    def __init__(
        self, source: Any, collate: Collate | None, *, pass_records: int | None, window: int | None
    ) -> None:
        self.source, self.collate = source, collate
        self.size, self.window = pass_records or ENDLESS, window or 1
        self._epoch = self._low = self._high = 0
        self._pass = self._given = 0
        self._kept: dict[int, Any] = {}
        self._states: list[StreamState] = []
        self._iterator: Iterator[Any] | None = None
        self.skips_because = "" if _has_state(source) else "it has no state_dict"
        """Why it is skipped through, where it might have told its state."""
        self.progress: Callable[[], object] = lambda: None
        self.sign_every = SIGN_OF_LIFE

    def __len__(self) -> int:
        return self.size

    def order(self, seed: int, epoch: int) -> Order:
        return StreamOrder(seed, epoch, self.size, self.window)

    def part(self, numbers: Positions) -> Any:
        raise AssertionError("no part of a stream can be set aside")

    def names(self, ids: Positions) -> Sequence[int]:
        return ids.tolist()

    def mark(self) -> bytes:
        return b"stream"

    # ---- reading

    def read(
        self, ids: Positions, visit: RecordVisit, seeder: Callable[..., None], *, keep: int
    ) -> None:
        """Until all of these are at hand; `keep` so many that were passed."""
        first, last = int(ids.min()), int(ids.max())
        self._be_at(visit, self.window_start(first))
        floor = self.window_start(first) - keep
        while self._high <= last:
            item = self._next(visit, seeder)
            if self._high >= floor:
                self._kept[self._high] = item
            self._high += 1
            self._note_state()
            if self._high % self.sign_every == 0:
                self.progress()
        for number in range(self._low, min(floor, self._high)):
            self._kept.pop(number, None)
        self._low = max(self._low, floor)
        before = [
            k for k, state in enumerate(self._states) if state[:2] <= (self._epoch, self._low)
        ]
        del self._states[: before[-1] if before else 0]

    def batch(self, ids: Positions, visit: RecordVisit = FIRST) -> Batch:
        numbers = ids.tolist()
        with one_process():
            return collated([self._kept[number] for number in numbers], numbers, self.collate)

    def window_start(self, number: int) -> int:
        return number - number % self.window

    def _be_at(self, visit: RecordVisit, start: int) -> None:
        """The record that comes next is not after `start`, or is at hand."""
        known = [s for s in self._states if s.epoch == visit.epoch and s.number <= start]
        best = max(known, key=lambda s: s.number, default=None)
        right = visit.epoch == self._epoch and self._low <= start
        if right and (best is None or best.number <= self._high):
            return
        self._kept.clear()
        self._iterator, self._epoch = None, visit.epoch
        if best is None:
            self._low = self._high = self._given = 0
            self._pass = visit.epoch
            return
        self._low = self._high = best.number
        self._pass, self._given = best.in_pass
        self._iterator = self._begin(best.own)

    def _next(self, visit: RecordVisit, seeder: Callable[..., None]) -> Any:
        seeder(visit.seed, visit.epoch, self._high, "stream")
        with one_process():
            while True:
                if self._iterator is None:
                    self._iterator = self._begin()
                try:
                    item = next(self._iterator)
                except StopIteration:
                    self._end_pass()
                else:
                    self._given += 1
                    return item

    def _end_pass(self) -> None:
        if self.size != ENDLESS:
            raise TaskError(
                f"the stream ended after {self._given} records in pass {self._pass}; "
                f"data.pass_records is {self.size}. It must give the same records each time."
            )
        if self._given == 0:
            raise TaskError("the stream given as data has no records.")
        self._iterator, self._given = None, 0
        self._pass += 1

    def _begin(self, state: Any = None) -> Iterator[Any]:
        """A pass over it: a new one, or from where its own state says."""
        if callable(set_epoch := getattr(self.source, "set_epoch", None)):
            set_epoch(self._pass)
        if state is not None and _has_state(self.source):
            self.source.load_state_dict(state)
        return begin_pass(self.source)

    # ---- its own state

    def _note_state(self) -> None:
        if self.skips_because or self._given % STATE_EVERY:
            return
        own = self.source.state_dict()
        try:
            encoded = msgspec.json.encode(own)
            plain = len(encoded) <= MOST_STATE_BYTES and msgspec.json.decode(encoded) == own
        except (TypeError, ValueError, OverflowError):
            encoded, plain = b"", False
        if not plain:
            self.skips_because = "its state is not plain data"
            self._states.clear()
            return
        kept = msgspec.json.decode(encoded)  # what it gave us it may go on changing
        self._states.append(StreamState(self._epoch, self._high, (self._pass, self._given), kept))

    def state(self, epoch: int, start: int) -> list[Any] | None:
        """For a checkpoint: the last state from which the record at position `start` is reached."""
        due = (epoch, self.window_start(start))
        known = [s for s in self._states if s.epoch == epoch and s[:2] <= due]
        return list(known[-1]) if known else None

    def offer(self, saved: Sequence[Any]) -> None:
        """What `state` gave, in other processes: it may begin there too."""
        if self.skips_because:
            return
        known = {state[:2]: state for state in self._states}
        for epoch, number, in_pass, own in saved:
            at = (epoch, number)
            known.setdefault(at, StreamState(epoch, number, (in_pass[0], in_pass[1]), own))
        self._states = [known[at] for at in sorted(known)]

    def near(self, ids: Positions, visit: RecordVisit, within: int) -> bool:
        """Whether it is being read, and these records come next, or soon, or are at hand."""
        start = self.window_start(int(ids.min()))
        return (
            self._iterator is not None
            and visit.epoch == self._epoch
            and self._low <= start <= self._high + within
        )

    def leave(self) -> None:
        """It is not read any more, for now: let go of what is open."""
        self._iterator, self._kept = None, {}
        self._low = self._high = self._given = 0
        self._epoch = self._pass = 0


def begin_pass(source: Any) -> Iterator[Any]:
    """A new pass; complains about what gives none."""
    found: Iterable[Any] = source() if not hasattr(source, "__iter__") else source
    if not hasattr(found, "__iter__"):
        raise TaskError(
            f"the function given as data returned {type(found).__name__}; it must yield records, "
            "or return what can be iterated."
        )
    return iter(found)


def count_records(source: Any, seed: Callable[[int], None]) -> int:
    """Of one pass, by reading it; `seed` is called with each number."""
    if callable(set_epoch := getattr(source, "set_epoch", None)):
        set_epoch(0)
    seed(0)
    iterator, count = begin_pass(source), 0
    while True:
        seed(count)
        try:
            next(iterator)
        except StopIteration:
            return count
        count += 1


def _has_state(source: Any) -> bool:
    return (
        callable(getattr(source, "state_dict", None))
        and callable(getattr(source, "load_state_dict", None))
        and not _loses_its_buffer(source)
    )


def _loses_its_buffer(source: Any) -> bool:
    """A shuffled stream of Hugging Face: what its buffer held is not in its state, and would be
    left out."""
    inside, depth = getattr(source, "_ex_iterable", None), 0
    while inside is not None and depth < 100:
        if "Shuffled" in type(inside).__name__:
            return True
        inside, depth = getattr(inside, "ex_iterable", None), depth + 1
    return False
