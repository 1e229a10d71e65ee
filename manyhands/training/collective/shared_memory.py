# SPDX-License-Identifier: Apache-2.0
"""Workers of one host, over shared memory: nothing is sent, everyone reads where others wrote.

One copy of the weights serves all workers, so `share` is only a meeting. A step costs two meetings
(`gather`, `share`), and each byte of gradient is read once by the worker that owns it.

What is written here outlives whoever wrote it. A `SharedRoom` is the part that does not change when
the members do; a `SharedMemory` is one view's use of it, with sequence words that no other view has
touched. What was gathered stays, with a stamp, until the same kind has been gathered twice more:
whoever finishes a step that others began reads it again (`SharedRoom.recall`). Rows are by rank in
the whole view, so that those of other hosts have a place among them (two_level.py); words and slots
are of this host's workers alone.
"""

from collections.abc import Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from manyhands.training.collective.collective import (
    FACTS,
    KINDS,
    Bytes,
    Meanwhile,
    Patience,
    Sizes,
    nothing,
    stretch,
)
from manyhands.training.collective.sequence_words import STRIDE, SequenceWords
from manyhands.training.memory.memory import Memory
from manyhands.training.state.layout import Bounds, Lanes
from manyhands.values.machine import MOST_RANKS
from manyhands.values.world import World

MOST_VIEWS = 1 << 24
_STAMP = 3  # generation, stamp, length


class SharedRoom:
    """Sequence words of every view, messages and partial sums of every rank."""

    def __init__(self, memory: Memory, sizes: Sizes) -> None:
        self.sizes = sizes
        self.words = memory.shelf(MOST_VIEWS, 2 * MOST_RANKS * STRIDE * 4)
        self.row_bytes = 8 * _STAMP + -(-sizes.message_bytes // 8) * 8
        self.tables = memory.shelf(2 * len(KINDS), MOST_RANKS * self.row_bytes)
        self._lanes = {
            dtype: memory.shelf(MOST_RANKS, sizes.slots * size * dtype.itemsize)
            for dtype, size in sizes.lanes.items()
        }
        self._slots: dict[int, list[Lanes]] = {}

    def slots(self, rank: int) -> list[Lanes]:
        """The partial sums that the worker of this rank wrote."""
        if rank not in self._slots:
            lanes = {
                dtype: shelf.tensor(rank, self.sizes.slots, self.sizes.lanes[dtype], dtype=dtype)
                for dtype, shelf in self._lanes.items()
            }
            self._slots[rank] = [
                {dtype: lane[k] for dtype, lane in lanes.items()} for k in range(self.sizes.slots)
            ]
        return self._slots[rank]

    def table(self, kind: int, turn: int) -> tuple[NDArray[np.int64], Bytes]:
        """Stamps and messages, by rank."""
        box = 2 * kind + turn
        whole = cast(Bytes, self.tables.array(box, MOST_RANKS, self.row_bytes, dtype=np.uint8))
        stamps = cast(
            NDArray[np.int64],
            self.tables.array(box, MOST_RANKS, self.row_bytes // 8, dtype=np.int64),
        )
        return stamps[:, :_STAMP], whole[:, 8 * _STAMP :]

    def recall(self, kind: int, stamp: int) -> list[Bytes]:
        """What was gathered last with this stamp, by rank; empty when nothing was."""
        best: tuple[int, list[Bytes]] = (0, [])
        for turn in range(2):
            stamps, messages = self.table(kind, turn)
            ranks = np.flatnonzero((stamps[:, 0] > 0) & (stamps[:, 1] == stamp))
            if len(ranks) and (newest := int(stamps[ranks, 0].max())) > best[0]:
                of_newest = [int(r) for r in ranks if stamps[r, 0] == newest]
                best = newest, [messages[r, : stamps[r, 2]] for r in of_newest]
        return best[1]


class SharedMemory:
    def __init__(
        self, world: World, room: SharedRoom, generation: int, *, spin: bool, patience: Patience
    ) -> None:
        assert world.num_ranks <= MOST_RANKS
        self.world, self.room, self.generation = world, room, generation
        both = room.words.array(generation, 2, MOST_RANKS * STRIDE, dtype=np.uint32)
        words, self._readiness = cast(NDArray[np.uint32], both)
        me, here = world.local_rank, world.local_ranks
        self.words = SequenceWords(words, me, here, spin=spin, patience=patience)
        self.slots: Sequence[Lanes] = room.slots(me)
        self._turns = [0] * len(KINDS)
        self._tables = {(kind, turn): room.table(kind, turn) for kind in KINDS for turn in range(2)}

    def readiness(self, patience: Patience) -> SequenceWords:
        """A second row of words: how far each worker is within a step."""
        me, here = self.world.local_rank, self.world.local_ranks
        return SequenceWords(self._readiness, me, here, spin=False, patience=patience, watched=True)

    def gather(
        self, mine: Bytes, kind: int = FACTS, stamp: int = 0, meanwhile: Meanwhile = nothing
    ) -> list[Bytes]:
        """Of this host's workers."""
        # Two tables in turn: a worker can be one meeting ahead of those still reading, not two.
        self._turns[kind] ^= 1
        self.put(self.world.rank, mine, kind, stamp)
        self.words.arrive()
        meanwhile()
        self.words.wait()
        return self.rows(self.world.ranks_of(self.world.host), kind, len(mine))

    def put(self, rank: int, message: Bytes, kind: int, stamp: int) -> None:
        """Write down what the worker of this rank has to say."""
        stamps, messages = self._tables[kind, self._turns[kind]]
        messages[rank, : len(message)] = message
        stamps[rank] = self.generation, stamp, len(message)

    def rows(self, ranks: range, kind: int, length: int) -> list[Bytes]:
        """What was written down last."""
        _, messages = self._tables[kind, self._turns[kind]]
        return [messages[rank, :length] for rank in ranks]

    def meet(self, meanwhile: Meanwhile = nothing, *, awaited: Sequence[int] | None = None) -> None:
        """`awaited`: only these workers of this host are waited for; None: all are."""
        self.words.arrive()
        meanwhile()
        self.words.wait(awaited)

    def exchange(self, counts: Sequence[int], owned: Sequence[Bounds]) -> list[list[Lanes]]:
        mine = owned[self.world.rank]
        return [
            [stretch(slot, mine) for slot in self.room.slots(rank)[:count]]
            for rank, count in enumerate(counts)
        ]

    def share(self, lanes: Lanes, owned: Sequence[Bounds]) -> None:
        self.meet()

    def recall(self, kind: int, stamp: int) -> list[Bytes]:
        return self.room.recall(kind, stamp)

    def left_by(self, rank: int) -> Sequence[Lanes]:
        return self.room.slots(rank)

    def close(self) -> None:
        """The memory stays, for whoever comes next."""
