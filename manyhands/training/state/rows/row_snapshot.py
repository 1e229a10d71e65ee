# SPDX-License-Identifier: Apache-2.0
"""The whole of a table as of one step, read in parts while later steps are applied between them.

Whatever changes after the snapshot began, in a bucket that has not been read yet, is kept as it was
before its first change: a row once, not its bucket, because a message touches nearly every bucket
and few rows of each. Nothing of it outlives the process; a successor begins a new one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from manyhands.training.state.rows.row_hash import (
    BUCKETS,
    IdHashes,
    Int64s,
    buckets_of,
    hashes_of,
    ids_of,
)
from manyhands.training.state.rows.row_index import ENTRIES
from manyhands.training.state.rows.row_store import RowStore
from manyhands.training.state.rows.table_part import TablePart, groups_of, sorted_part


@dataclass(frozen=True, slots=True)
class _Before:
    """How some entries were, in the order of their buckets; `values` as in `changed`."""

    buckets: Int64s
    hashes: IdHashes
    values: Int64s
    last: Int64s | None
    rows: dict[str, Tensor]

    def between(self, first: int, stop: int) -> "_Before":
        """Those of a range of buckets; nothing is copied."""
        a, b = (int(k) for k in np.searchsorted(self.buckets, (first, stop)))
        is_row = self.values > 0
        skipped, count = int(is_row[:a].sum()), int(is_row[a:b].sum())
        return _Before(
            self.buckets[a:b],
            self.hashes[a:b],
            self.values[a:b],
            None if self.last is None else self.last[a:b],
            {name: lane[skipped : skipped + count] for name, lane in self.rows.items()},
        )


class RowSnapshot:
    def __init__(self, store: RowStore) -> None:
        low, high = store.steps()
        assert low == high, "a snapshot begins between two steps"
        self.store, self.step = store, low
        self._to_read: NDArray[np.bool_] = store.buckets.copy()
        self._kept: NDArray[np.bool_] = np.zeros(BUCKETS * store.slots.per_bucket, np.bool_)
        """Slots. One that is used again is a row that was not there, which is known of it too."""
        self._changes: list[_Before] = []
        store.watchers.add(self)

    def parts(self) -> Iterator[TablePart]:
        """Between any two of them, steps may be applied."""
        for group in groups_of(np.flatnonzero(self._to_read), self.store.words[ENTRIES]):
            part = self._as_it_was(group)
            self._to_read[group] = False
            yield part
        self.store.watchers.discard(self)
        self._changes.clear()

    def changed(
        self, hashes: IdHashes, values: Int64s, last: Int64s | None, rows: dict[str, Tensor]
    ) -> None:
        """`values` as the index has them: slot + 1 of a row, 0 of what was not there."""
        buckets, is_row = buckets_of(hashes), values > 0
        wanted = self._to_read.take(buckets) & ~(
            is_row & self._kept.take(np.maximum(values - 1, 0))
        )
        if not wanted.any():
            return
        mine = np.flatnonzero(wanted)
        mine = mine[np.argsort(buckets[mine], kind="stable")]
        self._kept[values[wanted & is_row] - 1] = True
        number = (np.cumsum(is_row) - 1)[mine]
        of_rows = torch.from_numpy(number[is_row[mine]])
        self._changes.append(
            _Before(
                buckets[mine],
                hashes[mine],
                values[mine],
                None if last is None else last[mine],
                {name: lane.index_select(0, of_rows) for name, lane in rows.items()},
            )
        )

    def _as_it_was(self, group: Int64s) -> TablePart:
        now = self.store.part(group, self.step)
        old = [change.between(int(group[0]), int(group[-1]) + 1) for change in self._changes]
        old = [change for change in old if len(change.hashes)]
        if not old:
            return now
        hashes = hashes_of(now.ids)
        numbers = np.where(now.counts == 0, 1, -now.counts)
        current = _Before(buckets_of(hashes), hashes, numbers, now.last, dict(now.lanes))
        return self._first_of([*old, current])

    def _first_of(self, changes: Sequence[_Before]) -> TablePart:
        """The first that is known of an id is how it was; what is there now comes last."""
        hashes = np.concatenate([change.hashes for change in changes])
        values = np.concatenate([change.values for change in changes])
        first = np.zeros(len(hashes), np.bool_)
        first[np.unique(hashes, return_index=True)[1]] = True
        wanted = first & (values != 0)
        dates = [change.last for change in changes if change.last is not None]
        last = np.concatenate(dates) if dates else None
        if last is not None and self.store.spec.expire is not None:
            wanted &= self.step - last < self.store.spec.expire
        of_rows = torch.from_numpy(np.flatnonzero(wanted[values > 0]))
        rows = {
            name: torch.cat([change.rows[name] for change in changes]).index_select(0, of_rows)
            for name in changes[0].rows
        }
        return sorted_part(
            ids_of(hashes[wanted]), values[wanted], None if last is None else last[wanted], rows
        )
