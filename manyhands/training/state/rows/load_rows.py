# SPDX-License-Identifier: Apache-2.0
"""Rows that come from elsewhere, put into a table: from a checkpoint, from torch, or from another
server. One who is killed in this begins again, with `clear`."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from manyhands.training.state.rows import row_journal
from manyhands.training.state.rows.row_hash import BUCKETS, IdHashes, buckets_of, hashes_of
from manyhands.training.state.rows.row_index import DONE, ENTRIES
from manyhands.training.state.rows.row_store import RowStore
from manyhands.training.state.rows.table_part import TablePart, groups_of
from manyhands.values.errors import TableFull, WrongArguments


def clear(store: RowStore) -> None:
    """Nothing is in own buckets any more, and they have been through no step."""
    store.journals.heads[:] = 0
    store.index.forget(np.flatnonzero(store.buckets))


def load(store: RowStore, part: TablePart) -> None:
    """Add what is in `part`. State that it lacks begins anew; ids that are there are refused."""
    most, index = row_journal.MOST_ROWS, store.index
    numbers = np.cumsum(part.counts == 0) - 1
    for first in range(0, len(part.ids), most):
        some = slice(first, first + most)
        hashes, values = hashes_of(part.ids[some]), -part.counts[some].astype(np.int32)
        of_rows = torch.from_numpy(numbers[some][values == 0])
        lanes = {name: lane.index_select(0, of_rows) for name, lane in part.lanes.items()}
        places = _load(store, hashes, values, lanes)
        if index.last is not None:
            now = store.words[DONE].take(buckets_of(hashes))
            index.last[places] = now if part.last is None else part.last[some]


def begin_at(store: RowStore, step: int) -> None:
    """What was loaded is how things are after `step` steps."""
    store.words[DONE, store.buckets] = step


def _load(
    store: RowStore, hashes: IdHashes, values: NDArray[np.int32], lanes: dict[str, Tensor]
) -> NDArray[np.int64]:
    index, buckets, rows = store.index, buckets_of(hashes), values == 0
    more = np.bincount(buckets, minlength=BUCKETS)
    births = np.bincount(buckets[rows], minlength=BUCKETS)
    step, capacity = int(store.words[DONE].max()), store.spec.capacity
    if (why := store.why_full(more, births, step)) is not None:
        there = store.rows + int(births.sum())
        if there > capacity:  # that is why, whatever bucket was full first
            why = TableFull(store.spec.name, capacity, there, 0, step, "rows")
        raise why
    if (index.values.take(index.find(hashes)) != 0).any():
        raise WrongArguments(f"table '{store.spec.name}' has some of these rows already.")
    for group in groups_of(index.crowded(more), store.words[ENTRIES]):
        store.rebuild(group, more, np.zeros(0, np.int64))
    slots = store.slots.allocate(hashes[rows])
    store.slots.write(slots, lanes)
    values[rows] = slots + 1
    return index.insert(hashes, values, None)
