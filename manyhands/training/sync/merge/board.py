# SPDX-License-Identifier: Apache-2.0
"""What the members of a view tell each other while they are at different steps: words, mailboxes.

Every word has one writer, and is written after what it speaks of. There is a board for each view,
so nothing old is ever read as new, and all of it outlives whoever wrote it:

- A **push** lies in its worker's mailbox, of which there are two halves in turn. It is acknowledged
  as soon as PUSHED counts it. A half is written again when its push has been applied everywhere.
- The **order** in which pushes are applied is the head's: the record of push n, then what is true
  after it (`Tally`), then ORDERED = n + 1. All servers apply push n before push n + 1 is ordered,
  so at most one is half applied, and its gradient is still in its mailbox.
- On **several hosts** each has a board and mailboxes for all ranks. Who speaks for a host copies
  what others wrote to their own (relay.py), and again first what a word speaks of. There a push is
  ordered when it lies on every host (HELD).
- Weights are read while others write them. `versions` has a number per unit: 2 n after n pushes,
  and one more while push n is being applied; what was read between two looks at the same even
  number is one version.
"""

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from manyhands.training.collective.collective import Bytes
from manyhands.training.collective.sequence_words import STRIDE
from manyhands.training.collective.shared_memory import MOST_VIEWS
from manyhands.training.memory.memory import Memory
from manyhands.training.state.layout import Lanes, Layout
from manyhands.training.sync.merge.staleness import MOST_WORDS, AppliedSteps, StalenessCounts
from manyhands.values.machine import MOST_RANKS

# Of a member's row: what it has said, ...
PUSHED, HEARD, ASKED, AT, APPLIED = range(5)
# ... and what the head has said to it.
ANSWERED, GRANTED, TAKEN, FREED = range(8, 12)
# On several hosts, on the head's: so many of its pushes lie on every host.
HELD = 12
_ROW = 16
# The head's own words.
ORDERED, MEETING, AGREED, BEGAN, HOSTS = range(5)
_ORDERS = 8  # two records, by the parity of the push, of [rank, sequence, meets, agreed]
_WORDS = 16
MOST_STALE = 63
"""Staleness from here on is counted together."""
TALLY_WORDS = 2 + MOST_WORDS + 3 * MOST_RANKS + MOST_STALE + 1
_HEADER = 8


@dataclass(frozen=True, slots=True)
class PushOrder:
    """StepPush n is this one."""

    rank: int
    sequence: int
    """Of its worker's pushes in this view, from 1."""
    meets: bool
    """All meet after it, ..."""
    agreed: int
    """... having heard this command."""


@dataclass(frozen=True, slots=True)
class Tally:
    """What is true after n pushes; the counts are of one view."""

    applied: AppliedSteps
    computed: tuple[tuple[int, int, int], ...] = ()
    """By rank: steps, micro-batches, records."""
    staleness: StalenessCounts = field(default_factory=StalenessCounts)

    def add(self, rank: int, push: "StepPush", n: int) -> "Tally":
        """After push n, which this is."""
        rows = list(self.computed)
        steps, leaves, records = rows[rank]
        rows[rank] = steps + 1, leaves + push.leaves, records + push.records
        applied = self.applied.add(push.step)
        return Tally(applied, tuple(rows), self.staleness.add(push.read, n + 1))


@dataclass(frozen=True, slots=True)
class StepPush:
    """What lies in a mailbox."""

    step: int
    read: int
    """The oldest version of any unit that it was computed on."""
    leaves: int
    records: int
    factor: float
    """What the gradient is multiplied with (clipping)."""
    facts: Bytes
    gradient: Lanes


class Boards:
    """Those of all views, and the mailboxes."""

    def __init__(self, memory: Memory, layout: Layout, message_bytes: int) -> None:
        self._sizes = layout.trainable_sizes
        nbytes = 8 * (_WORDS + MOST_RANKS * _ROW + 2 * TALLY_WORDS) + 4 * MOST_RANKS * STRIDE
        self._views = memory.shelf(MOST_VIEWS, nbytes)
        self._mail = {
            dtype: memory.shelf(2 * MOST_RANKS, size * dtype.itemsize)
            for dtype, size in self._sizes.items()
        }
        self._facts_bytes = 8 * _HEADER + message_bytes
        self._facts = memory.shelf(2 * MOST_RANKS, self._facts_bytes)
        self.versions = cast(
            NDArray[np.int64], memory.array(layout.first_blocks[-1] + 1, dtype=np.int64)
        )
        """By the first block of a unit."""
        self._in_force = cast(NDArray[np.int64], memory.array(1, dtype=np.int64))
        self._opened: dict[tuple[int, int], Lanes] = {}
        self._heads: dict[tuple[int, int], tuple[Any, Any, Bytes]] = {}

    def of(self, generation: int) -> "Board":
        return Board(self, self._views, generation)

    @property
    def in_force(self) -> "Board | None":
        """The one of the last view that began to train; None: all that is kept is whole."""
        generation = int(self._in_force[0])
        return self.of(generation) if generation else None

    def put_in_force(self, generation: int) -> None:
        """0: none."""
        self._in_force[0] = generation

    def lanes(self, rank: int, half: int) -> Lanes:
        """The gradient in one half of a mailbox."""
        if (rank, half) not in self._opened:
            self._opened[rank, half] = {
                dtype: shelf.tensor(2 * rank + half, self._sizes[dtype], dtype=dtype)
                for dtype, shelf in self._mail.items()
            }
        return self._opened[rank, half]

    def put(self, rank: int, half: int, push: StepPush) -> None:
        """All but the gradient, which is there already."""
        head, factor, facts = self._open(rank, half)
        head[:5] = push.step, push.read, push.leaves, push.records, len(push.facts)
        head[5] = time.monotonic_ns()  # the same for all processes of a host
        factor[0] = push.factor
        facts[: len(push.facts)] = push.facts

    def get(self, rank: int, half: int) -> StepPush:
        head, factor, facts = self._open(rank, half)
        step, read, leaves, records, length = head[:5].tolist()
        told = facts[:length]
        return StepPush(step, read, leaves, records, float(factor[0]), told, self.lanes(rank, half))

    def age_s(self, rank: int, half: int) -> float:
        """How long ago it was put there."""
        return 1e-9 * (time.monotonic_ns() - int(self._open(rank, half)[0][5]))

    def arrived(self, rank: int, half: int) -> None:
        """From another host, whose clock is not ours."""
        self._open(rank, half)[0][5] = time.monotonic_ns()

    def buffers(self, rank: int, half: int) -> list[memoryview]:
        """All of a push, in an order that all hosts agree on. Also room that it does not need: all
        have the same size."""
        facts = self._facts.array(2 * rank + half, self._facts_bytes, dtype=np.uint8)
        lanes = self.lanes(rank, half)
        views = [lanes[d].view(torch.uint8).numpy().data for d in sorted(lanes, key=str)]
        return [view for view in (facts.data, *views) if view.nbytes]

    def problem(self, rank: int, half: int) -> str | None:
        """Why what another host has put here can be no push, if so."""
        head, factor, facts = self._open(rank, half)
        step, read, leaves, records, length = (int(n) for n in head[:5])
        if min(step, read, records) < 0 or leaves < 1 or not 0 <= length <= len(facts):
            return f"of step {step}, with {leaves} micro-batches, {records} records, {length} bytes"
        return None if math.isfinite(float(factor[0])) else f"that is multiplied by {factor[0]}"

    def _open(self, rank: int, half: int) -> tuple[Any, Any, Bytes]:
        if (rank, half) not in self._heads:
            box, room = 2 * rank + half, self._facts_bytes - 8 * _HEADER
            head = self._facts.array(box, _HEADER, dtype=np.int64)
            factor = self._facts.array(box, 1, dtype=np.float64, at=8 * (_HEADER - 1))
            facts = cast(Bytes, self._facts.array(box, room, dtype=np.uint8, at=8 * _HEADER))
            self._heads[rank, half] = head, factor, facts
        return self._heads[rank, half]


class Board:
    """One view's."""

    def __init__(self, boards: Boards, views: Any, generation: int) -> None:
        self.boards, self.generation = boards, generation
        at = 8 * _WORDS
        self.words: Any = views.array(generation, _WORDS, dtype=np.int64)
        self.rows: Any = views.array(generation, MOST_RANKS, _ROW, dtype=np.int64, at=at)
        at += 8 * MOST_RANKS * _ROW
        self._tallies: Any = views.array(generation, 2, TALLY_WORDS, dtype=np.int64, at=at)
        at += 16 * TALLY_WORDS
        bells = views.array(generation, MOST_RANKS * STRIDE, dtype=np.uint32, at=at)
        self.bells = cast(NDArray[np.uint32], bells)

    def begin(self, done: int, tally: Tally, ranks: Iterable[int], hosts: int) -> None:
        """By who speaks for the host, before anybody uses it: `done` pushes have been applied."""
        self._put_tally(done, tally)
        self.words[HOSTS] = hosts
        self.words[BEGAN] = self.words[MEETING] = self.words[ORDERED] = done
        for rank in ranks:
            self.rows[rank, AT] = self.rows[rank, APPLIED] = done

    @property
    def began(self) -> int:
        """Pushes that had been applied when the view began."""
        return int(self.words[BEGAN])

    @property
    def hosts(self) -> int:
        """Of its view."""
        return int(self.words[HOSTS])

    @property
    def ordered(self) -> int:
        return int(self.words[ORDERED])

    def put_order(self, n: int, order: PushOrder, tally: Tally) -> None:
        """StepPush n is this one, and this is so after it."""
        at = _ORDERS + 4 * (n % 2)
        self.words[at : at + 4] = order.rank, order.sequence, order.meets, order.agreed
        self._put_tally(n + 1, tally)
        self.words[ORDERED] = n + 1
        self.rows[order.rank, TAKEN] = order.sequence

    def order(self, n: int) -> PushOrder:
        """Of push n, which was ordered last or the one before."""
        at = _ORDERS + 4 * (n % 2)
        rank, sequence, meets, agreed = self.words[at : at + 4].tolist()
        return PushOrder(rank, sequence, bool(meets), agreed)

    def push(self, order: PushOrder) -> StepPush:
        return self.boards.get(order.rank, order.sequence % 2)

    def tally(self) -> Tally:
        """After what was ordered."""
        return tally_of(self.tally_words())

    def tally_words(self) -> NDArray[np.int64]:
        """The same, to be sent to another host: after how many pushes, and what is so then."""
        words = self._tallies[self.ordered % 2]
        assert words[0] == self.ordered, "it is written before ORDERED is"
        return words

    def _put_tally(self, n: int, tally: Tally) -> None:
        words, at = self._tallies[n % 2], 2 + MOST_WORDS
        words[0] = -1
        words[1:] = 0
        words[1] = len(tally.computed)
        words[2 : 2 + len(tally.applied.words)] = tally.applied.words
        flat = [number for row in tally.computed for number in row]
        words[at : at + len(flat)] = flat
        at += 3 * MOST_RANKS
        counts = tally.staleness.counts
        words[at : at + min(len(counts), MOST_STALE)] = counts[:MOST_STALE]
        words[at + MOST_STALE] = sum(counts[MOST_STALE:])
        words[0] = n

    def waiting(self, applied: int, workers: Iterable[int]) -> int:
        """How many pushes lie there that are not among the first so many."""
        return sum(self.column(PUSHED, workers)) - (applied - self.began)

    def column(self, word: int, ranks: Iterable[int]) -> list[int]:
        said = self.rows[:, word]
        return [said.item(rank) for rank in ranks]


def tally_of(words: NDArray[np.int64]) -> Tally:
    """From `Board.tally_words`, of this host or another."""
    ranks, at = int(words[1]), 2 + MOST_WORDS
    applied = AppliedSteps.from_words(words[2:at].tolist())
    rows = words[at : at + 3 * ranks].reshape(ranks, 3).tolist()
    counts = words[at + 3 * MOST_RANKS :].tolist()
    while counts and counts[-1] == 0:
        counts.pop()
    return Tally(applied, tuple((a, b, c) for a, b, c in rows), StalenessCounts(tuple(counts)))
