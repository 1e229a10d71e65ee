# SPDX-License-Identifier: Apache-2.0
"""Where rows lie: weights and optimizer state, a slot of each for a row.

Every bucket has a range of slots, as long as any bucket of a table of this capacity gets by chance
(eight standard deviations, and a few), so that writers of different buckets never meet. The memory
is sparse: what no row has been in takes none. Slots that were given back are used first.
"""

import math
from collections.abc import Mapping
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from manyhands.training.memory.memory import Memory
from manyhands.training.state.rows.row_hash import BUCKETS, IdHashes, Int64s, buckets_of
from manyhands.training.state.rows.row_index import FREE, USED, RowIndex
from manyhands.training.state.rows.row_journal import RowJournal, cells_of
from manyhands.training.state.rows.row_optimizers import (
    RowOptimizer,
    block_rows,
    padded_columns,
    padded_rows,
)
from manyhands.training.state.rows.row_passes import row_passes
from manyhands.training.state.rows.table_part import WEIGHTS


def slots_per_bucket(capacity: int) -> int:
    mean = capacity / BUCKETS
    # Odd, or the first rows of all buckets would share a few lines of the processor's cache.
    return min(capacity, max(1024, math.ceil(mean + 8 * math.sqrt(mean) + 64))) | 1


class RowSlots:
    def __init__(
        self, memory: Memory, index: RowIndex, capacity: int, dim: int, optimizer: RowOptimizer
    ) -> None:
        self.index, self.words = index, index.words
        self.dim, self.width = dim, padded_columns(dim)
        self.per_bucket = slots_per_bucket(capacity)
        self.columns: dict[str, int] = {WEIGHTS: dim}
        """Of each lane, those that count."""
        widths, self.initial = {WEIGHTS: self.width}, dict[str, float]()
        for name, lane in optimizer.lanes.items():
            self.columns[name] = dim if lane.per_element else 1
            widths[name] = self.width if lane.per_element else 1
            self.initial[name] = lane.initial
        slots = self.per_bucket * BUCKETS
        self.lanes = {
            name: memory.tensor(slots, width, dtype=torch.float32) for name, width in widths.items()
        }
        self.cells = {name: cells_of(lane) for name, lane in self.lanes.items()}
        given_back = memory.array(BUCKETS, self.per_bucket, dtype=np.int32)
        self._given_back = cast(NDArray[np.int32], given_back)
        self._block = block_rows(self.width)
        most = padded_rows(self._block, self.width)
        self._work = {
            name: torch.zeros(most, width, dtype=torch.float32) for name, width in widths.items()
        }
        self._grads = torch.zeros(most, self.width, dtype=torch.float32)

    @property
    def rows(self) -> int:
        return int(self.words[USED].sum() - self.words[FREE].sum())

    def in_use(self) -> Int64s:
        """Slots by bucket."""
        return self.words[USED] - self.words[FREE]

    def allocate(self, hashes: IdHashes) -> Int64s:
        """A slot for each of these, in its bucket. Within a transaction."""
        if (passes := row_passes()) is not None:
            words = self.words[USED], self.words[FREE]
            return passes.allocate(np.ascontiguousarray(hashes), *words, self._given_back)
        buckets = buckets_of(hashes)
        order = np.argsort(buckets, kind="stable")
        counts = np.bincount(buckets, minlength=BUCKETS)
        bucket = buckets.take(order)
        rank = np.arange(len(buckets)) - (np.cumsum(counts) - counts).take(bucket)
        used, free = self.words[USED].take(bucket), self.words[FREE].take(bucket)
        again = np.flatnonzero(rank < free)
        local = used + rank - free
        local[again] = self._given_back[bucket[again], (free - 1 - rank)[again]]
        from_free = np.minimum(counts, self.words[FREE])
        self.index.count(FREE, -from_free)
        self.index.count(USED, counts - from_free)
        slots = np.empty(len(buckets), np.int64)
        slots[order] = bucket * self.per_bucket + local
        return slots

    def release(self, slots: Int64s) -> None:
        """Within a transaction, in which none is allocated."""
        slots = np.sort(slots)
        bucket, local = slots // self.per_bucket, slots % self.per_bucket
        counts = np.bincount(bucket, minlength=BUCKETS)
        rank = np.arange(len(slots)) - (np.cumsum(counts) - counts).take(bucket)
        self._given_back[bucket, self.words[FREE].take(bucket) + rank] = local
        self.index.count(FREE, counts)

    def write(self, slots: Int64s, values: Mapping[str, Tensor]) -> None:
        """Whole rows, to slots that no entry names yet. Lanes that are not given begin anew."""
        passes = row_passes()
        for name, lane in self.lanes.items():
            given = values.get(name)
            if passes is not None and (given is None or given.shape[1] == self.columns[name]):
                given = None if given is None else given.contiguous()
                passes.write(lane, slots, given, self.initial.get(name, 0.0))
                continue
            rows = torch.zeros(len(slots), lane.shape[1], dtype=torch.float32)
            if name in values:
                rows[:, : self.columns[name]] = values[name]
            else:
                rows.fill_(self.initial[name])
            self.cells[name][slots] = cells_of(rows)

    def update(
        self, slots: Int64s, grads: Tensor, step: int, optimizer: RowOptimizer, journal: RowJournal
    ) -> None:
        """One step of these rows. Blocks of them are gathered, copied aside and changed while they
        are in a near cache."""
        for first in range(0, len(slots), self._block):
            block = slots[first : first + self._block]
            rows = padded_rows(len(block), self.width)
            work = {name: whole[:rows] for name, whole in self._work.items()}
            journal.keep_rows(block, list(work.values()))
            gradient = self._grads[:rows]
            if self.dim < self.width:
                gradient[:, self.dim :] = 0
            gradient[: len(block), : self.dim].copy_(grads[first : first + len(block)])
            state = {name: lane for name, lane in work.items() if name != WEIGHTS}
            optimizer.update(work[WEIGHTS], state, gradient, step, self.dim)
            journal.put_rows(block, list(work.values()))

    def gather(self, slots: Int64s) -> dict[str, Tensor]:
        return {name: self.gather_lane(name, slots) for name in self.lanes}

    def gather_lane(self, name: str, slots: Int64s, out: Tensor | None = None) -> Tensor:
        columns = self.columns[name]
        if columns < self.lanes[name].shape[1]:
            lane = self.lanes[name][:, :columns]
            return torch.index_select(lane, 0, torch.from_numpy(slots), out=out)
        rows = torch.empty(len(slots), columns, dtype=torch.float32) if out is None else out
        self.cells[name].take(slots, out=cells_of(rows), mode="clip")  # "raise" copies twice
        return rows
