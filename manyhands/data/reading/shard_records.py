# SPDX-License-Identifier: Apache-2.0
"""Prepared data as records: any batch, from shards that are opened when they are needed.

Memory holds the shards of at most two windows of the order (`shuffle_windows`): the one that is
being read, and the next, which is opened and checked in the background. Batches are copies, so
closing a shard is safe.

Invariant: what a batch holds depends on the folder, the options, the record numbers and the visit;
not on what is open, on the process, or on what was read before.
"""

import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from manyhands.data.columns.array_types import Positions
from manyhands.data.columns.schema import ID
from manyhands.data.ordering.epoch_order import FIRST, RecordVisit
from manyhands.data.ordering.record_randomness import Draw
from manyhands.data.ordering.shuffle_windows import ShardOrder, Windows, cuts_of, starts_of
from manyhands.data.reading.batch_columns import (
    add_column,
    batch_columns,
    with_features_named,
    with_stacks,
)
from manyhands.data.reading.open_shards import OpenShards
from manyhands.data.reading.pad_and_collate import Pick, Picks, take_fixed
from manyhands.data.reading.prepared_data import PreparedData
from manyhands.data.shards.manifest import Listing, Manifest, ShardInfo, SplitInfo, read_listing
from manyhands.data.shards.shard_file import OpenShard, open_shard
from manyhands.values.errors import DataDamaged, DataError

WINDOW_BYTES = 128 << 20
"""Records are mixed within as many shards as hold this much."""


class ShardRecords:
    def __init__(
        self,
        data: PreparedData,
        numbers: Positions | None = None,
        listing: Listing | None = None,
    ) -> None:
        """`numbers`: only these records of the split, ascending. `listing`: the folder's, where it
        has been read already."""
        self._listing = listing or read_listing(data.folder)
        manifest = self._listing.manifest
        self.data = data = with_features_named(data, manifest.schema)
        split = _split(manifest, data)
        self._schema = manifest.schema
        self._shards: list[ShardInfo] = split.shards
        self._starts = starts_of([shard.rows for shard in split.shards])
        self._numbers = numbers
        self._columns = batch_columns(manifest.schema, data)
        self._sizes = np.diff(self._starts)
        window = data.window or max(1, split.rows * WINDOW_BYTES // max(1, split.nbytes))
        if numbers is not None:  # as many shards in a window as if all records were read
            self._sizes = np.diff(np.searchsorted(numbers, self._starts))
            window = max(1, window * len(numbers) // max(1, split.rows))
        self._window = window
        self._size = int(self._sizes.sum())
        self.draws_randomness = data.transform is not None
        self._begin()

    def _begin(self) -> None:
        """With nothing open; also in a process that was forked, where no thread of ours lives."""
        self._pid = os.getpid()
        self._open_shards = OpenShards(self._open, self._let_go)
        self._orders: dict[tuple[int, int], ShardOrder] = {}
        self._in_a_row: Windows | None = None
        self._ahead: tuple[RecordVisit, int] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardRecords, (self.data, self._numbers)

    def __len__(self) -> int:
        return self._size

    def order(self, seed: int, epoch: int) -> ShardOrder:
        """Kept for two epochs: the one that is read, and the next."""
        if (seed, epoch) not in self._orders:
            self._orders = dict(list(self._orders.items())[-1:])
            self._orders[seed, epoch] = ShardOrder(seed, epoch, self._sizes, self._window)
        return self._orders[seed, epoch]

    def batch(self, ids: Positions, visit: RecordVisit = FIRST) -> dict[str, Any]:
        shards, picks = self._find(ids)
        opened = [self._open_shards[shard].columns for shard in shards]
        batch: dict[str, Any] = {}
        for name, kind in self._columns:
            rows = [columns[name] for columns in opened]
            add_column(batch, name, kind, rows, picks, len(ids), self.data.pad)
        self._look_ahead(shards, visit)
        if self.data.transform is None:
            return batch
        draw = Draw(visit.seed, visit.epoch, batch[ID].numpy(), visit.training)
        return self.data.transform(batch, draw)

    def part(self, numbers: Positions) -> "ShardRecords":
        of_split = numbers if self._numbers is None else self._numbers[numbers]
        return ShardRecords(self.data, np.sort(of_split), self._listing)

    def names(self, ids: Positions) -> Sequence[int]:
        """The `_id` of each; where the shard is the trouble, its number in the split."""
        shards, picks = self._find(ids)
        try:
            columns: list[Any] = [self._open_shards[shard].columns[ID] for shard in shards]
        except DataDamaged:
            return ids.tolist()
        return take_fixed(columns, picks, len(ids)).tolist()

    def mark(self) -> bytes:
        """Of what is read, not of where: a folder and a copy of it behind a URL have the same."""
        return self.data.split.encode() + self._listing.raw

    @property
    def shards(self) -> Sequence[ShardInfo]:
        """All that may be read."""
        return self._shards

    def open_bytes(self) -> int:
        """About how much a process has open at once: two windows."""
        windows = self._plan(RecordVisit(training=False)).shards
        sizes = [sum(self._shards[shard].nbytes for shard in window) for window in windows]
        return max([*map(sum, pairwise(sizes)), *sizes])

    def close(self) -> None:
        self._open_shards.close()

    # ---- which rows of which shards

    def _find(self, ids: Positions) -> tuple[list[int], Picks]:
        """The shards that hold these records, and which rows they are."""
        if os.getpid() != self._pid:
            self._begin()
        numbers = ids if self._numbers is None else self._numbers[ids]
        if len(self._shards) == 1:
            return [0], [Pick(numbers, slice(None))]
        shards = self._starts.searchsorted(numbers, "right") - 1
        rows = numbers - self._starts[shards]
        grouped = shards.argsort(kind="stable")
        shards = shards[grouped]
        if shards[0] == shards[-1]:
            return [int(shards[0])], [Pick(rows, slice(None))]
        rows = rows[grouped]
        (ends,) = (shards[1:] != shards[:-1]).nonzero()
        cuts = [0, *(ends + 1).tolist(), len(shards)]
        picks = [Pick(rows[a:b], grouped[a:b]) for a, b in pairwise(cuts)]
        return shards[cuts[:-1]].tolist(), picks

    # ---- what is open

    def _open(self, number: int) -> OpenShard:
        info, transfer = self._shards[number], self.data.transfer
        if transfer is None:
            assert isinstance(self.data.folder, Path), "`open_data` chooses a transfer for a URL"
            return self._stacked(self.data.folder / info.file, info, self.data.verify)
        path = transfer.path(info)  # which has compared every block
        try:
            return self._stacked(path, info, False)
        except BaseException:
            transfer.release(info)
            raise

    def _stacked(self, path: Path, info: ShardInfo, verify: bool) -> OpenShard:
        shard = open_shard(path, info, self._schema, verify=verify)
        return OpenShard(shard.rows, with_stacks(shard.columns, shard.rows, self.data.stack))

    def _let_go(self, number: int) -> None:
        if self.data.transfer is not None:
            self.data.transfer.release(self._shards[number])

    def _look_ahead(self, shards: list[int], visit: RecordVisit) -> None:
        """Open the next window in the background, and close those before this one."""
        windows = self._plan(visit)
        touched = sorted({windows.of[shard] for shard in shards})
        if self._ahead == (visit, touched[0]):
            return
        self._ahead = (visit, touched[0])
        here = [shard for window in touched for shard in windows.shards[window]]
        following: Sequence[int] = []
        if touched[0] + 1 < len(windows.shards):
            following = windows.shards[touched[0] + 1]
        elif visit.training:
            following = self.order(visit.seed, visit.epoch + 1).windows.shards[0]
        self._open_shards.keep({*here, *following})
        self._open_shards.want([*here, *following])

    def _plan(self, visit: RecordVisit) -> Windows:
        if visit.training:
            return self.order(visit.seed, visit.epoch).windows
        if self._in_a_row is None:
            starts = starts_of(self._sizes)
            self._in_a_row = Windows(np.arange(len(self._sizes)), cuts_of(starts, self._window))
        return self._in_a_row


def _split(manifest: Manifest, data: PreparedData) -> SplitInfo:
    if data.split not in manifest.splits:
        there = ", ".join(manifest.splits) or f"fold-0 to fold-{manifest.folds - 1}, each a folder"
        raise DataError(f"{data.folder} has no split '{data.split}'; there are {there}.")
    return manifest.splits[data.split]
