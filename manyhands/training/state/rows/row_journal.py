# SPDX-License-Identifier: Apache-2.0
"""Why nothing of a table is ever found half done, though its writer can be killed anywhere.

Every change is a transaction over some buckets. Before its first store the words of all buckets
are copied aside; before a store to anything that can be seen, what is there is copied aside too:

    open      copy the words of the buckets, then mark the journal as open  died before: nothing
    claim     note free places of the index, count them, then take them     died here: freed again
    keep      copy rows (or entries of the index) aside, count them, then change them
                                                                            died here: copied back
    close     mark the journal as void                                      died before: all undone

What cannot be seen yet (a row in a slot that no entry names, a region of the index that no word
names) is written without more ado. `undo` is idempotent: who repairs may be killed too. One of the
words is how many steps a bucket has been through, so after a repair everything is as before the
transaction or as after it, and the words say which.

A journal belongs to one writer, and writers have different buckets; only their own are put back.
"""

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from manyhands.training.memory.memory import Boxes, Memory
from manyhands.training.state.rows.row_hash import BUCKETS
from manyhands.training.state.rows.row_index import RowIndex
from manyhands.training.state.rows.row_passes import NativeLane, address, row_passes

MOST_ROWS = 1 << 16
"""Of one transaction."""
Cells = NDArray[np.void]
_IDLE, _OPEN = range(2)
_STATE, _CLAIMED, _ROWS, _ENTRIES = range(4)
_HEAD_WORDS = 8


def cells_of(rows: Tensor) -> Cells:
    """The same memory with each row as one value: numpy moves those several times as fast."""
    return rows.numpy().view(np.dtype((np.void, 4 * rows.shape[1]))).reshape(-1)


class RowJournals:
    """Room for one of each writer; those in use are mapped."""

    def __init__(
        self, memory: Memory, index: RowIndex, lanes: Sequence[Tensor], writers: int
    ) -> None:
        self.index, self.lanes = index, lanes
        self.heads = cast(Any, memory.array(writers, _HEAD_WORDS, dtype=np.int64))
        self._shelf = memory.shelf(writers, RowJournal.nbytes(index, lanes))
        self._opened: dict[int, RowJournal] = {}

    def of(self, writer: int) -> "RowJournal":
        if writer not in self._opened:
            head = self.heads[writer]
            self._opened[writer] = RowJournal(head, self._shelf, writer, self.index, self.lanes)
        return self._opened[writer]

    def undo(self) -> int:
        """What dead writers were in the middle of; how many. Nobody may be writing."""
        torn = [int(writer) for writer in np.flatnonzero(self.heads[:, _STATE] != _IDLE)]
        for writer in torn:
            self.of(writer).undo()
        return len(torn)


class RowJournal:
    def __init__(
        self, head: Any, shelf: Boxes, writer: int, index: RowIndex, lanes: Sequence[Tensor]
    ) -> None:
        self.head, self.index, self.lanes = head, index, lanes
        at = 0

        def array(*shape: int, dtype: type[np.generic]) -> Any:
            nonlocal at
            made = shelf.array(writer, *shape, dtype=dtype, at=at)
            at += _padded(made.nbytes)
            return made

        self.mask: NDArray[np.bool_] = array(BUCKETS, dtype=np.bool_)
        self.words: NDArray[np.int64] = array(*index.words.shape, dtype=np.int64)
        self.claimed: NDArray[np.int64] = array(MOST_ROWS, dtype=np.int64)
        self.slots: NDArray[np.int64] = array(MOST_ROWS, dtype=np.int64)
        self.places: NDArray[np.int64] = array(MOST_ROWS, dtype=np.int64)
        self.values: NDArray[np.int32] = array(MOST_ROWS, dtype=np.int32)
        self.last: NDArray[np.int64] = array(MOST_ROWS, dtype=np.int64)
        self.copies: list[Tensor] = []
        for lane in lanes:
            copy = array(MOST_ROWS, lane.shape[1], dtype=np.float32)
            self.copies.append(torch.from_numpy(copy))
        self._cells = [(cells_of(lane), cells_of(copy)) for lane, copy in self._pairs()]
        self.native = (NativeLane * len(lanes))(
            *(
                (lane.data_ptr(), copy.data_ptr(), None, lane.shape[1])
                for lane, copy in self._pairs()
            )
        )
        counters = address(self.head)
        self._kept = address(self.slots), counters + 8 * _ROWS
        self.claims = address(self.claimed), counters + 8 * _CLAIMED
        """Addresses, for native passes: where places are noted, and counted."""

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(self.lanes, self.copies, strict=True)

    @staticmethod
    def nbytes(index: RowIndex, lanes: Sequence[Tensor]) -> int:
        of_row = [8, 8, 8, 4, 8, *(4 * lane.shape[1] for lane in lanes)]
        return sum(_padded(MOST_ROWS * n) for n in of_row) + BUCKETS + index.words.nbytes + 128

    @contextmanager
    def transaction(self, buckets: NDArray[np.bool_]) -> Generator[None]:
        """Around all stores of a change to these; what raises is undone."""
        self.open(buckets)
        try:
            yield
        except BaseException:
            self.undo()
            raise
        self.close()

    def open(self, buckets: NDArray[np.bool_]) -> None:
        assert self.head[_STATE] == _IDLE, "repair comes first"
        self.mask[:] = buckets
        self.words[:] = self.index.words
        self.head[_CLAIMED:] = 0
        self.head[_STATE] = _OPEN

    def claim(self, places: NDArray[np.int64]) -> None:
        """Before free places of the index are taken."""
        first = int(self.head[_CLAIMED])
        self.claimed[first : first + len(places)] = places
        self.head[_CLAIMED] = first + len(places)

    def keep_entries(self, places: NDArray[np.int64]) -> None:
        """Before what entries say is changed."""
        count, index = len(places), self.index
        self.places[:count] = places
        self.values[:count] = index.values.take(places)
        if index.last is not None:
            self.last[:count] = index.last.take(places)
        self.head[_ENTRIES] = count

    def keep_rows(self, slots: NDArray[np.int64], work: Sequence[Tensor]) -> None:
        """Before rows are changed; what is there is copied to `work` too, lane by lane. Adds to
        those kept before."""
        first = int(self.head[_ROWS])
        stop = first + len(slots)
        if (passes := row_passes()) is not None:
            for lane, room in zip(self.native, work, strict=True):
                lane.work = room.data_ptr()
            passes.keep(self.native, slots, *self._kept)
            return
        self.slots[first:stop] = slots
        for cells, copies in self._cells:
            cells.take(slots, out=copies[first:stop], mode="clip")
        self.head[_ROWS] = stop
        for room, copy in zip(work, self.copies, strict=True):
            room[: len(slots)].copy_(copy[first:stop])

    def put_rows(self, slots: NDArray[np.int64], work: Sequence[Tensor]) -> None:
        """What has been made of those kept last, in `work`, to where they came from."""
        if (passes := row_passes()) is not None:
            passes.put(self.native, slots)
            return
        for (cells, _), rows in zip(self._cells, work, strict=True):
            cells[slots] = cells_of(rows)[: len(slots)]

    def close(self) -> None:
        self.head[_STATE] = _IDLE

    def undo(self) -> None:
        index, rows, entries = self.index, int(self.head[_ROWS]), int(self.head[_ENTRIES])
        for cells, copies in self._cells:
            cells[self.slots[:rows]] = copies[:rows]
        index.values[self.places[:entries]] = self.values[:entries]
        if index.last is not None:
            index.last[self.places[:entries]] = self.last[:entries]
        claimed = self.claimed[: int(self.head[_CLAIMED])]
        index.keys[claimed] = 0
        index.values[claimed] = 0
        index.words[:, self.mask] = self.words[:, self.mask]
        self.close()


def _padded(nbytes: int) -> int:
    return -(-nbytes // 64) * 64
