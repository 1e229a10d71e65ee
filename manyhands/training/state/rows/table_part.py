# SPDX-License-Identifier: Apache-2.0
"""Some of a table's rows as plain arrays: what is saved, moved, compared and put in again."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from manyhands.training.state.rows.row_hash import BUCKETS, Ids, buckets_of, hashes_of

WEIGHTS = "weights"
GROUP, GROUP_ENTRIES = 64, 1 << 16
"""So many buckets, or entries if that is less, are read or rebuilt at a time."""


@dataclass(frozen=True, slots=True)
class TablePart:
    """Bucket by bucket, and by id in each: slots and the order of insertion leave no trace."""

    ids: Ids
    counts: NDArray[np.int64]
    """0: a row. Otherwise how often it was seen, while it waits to be admitted."""
    last: NDArray[np.int64] | None
    """The step in which each was last seen, where rows expire."""
    lanes: Mapping[str, Tensor]
    """"weights" and the optimizer's state, of those that are rows: [rows, dim], or [rows, 1]."""

    @property
    def row_ids(self) -> Ids:
        return self.ids[self.counts == 0]


def sorted_part(
    ids: Ids,
    values: NDArray[np.int64],
    last: NDArray[np.int64] | None,
    lanes: Mapping[str, Tensor],
) -> TablePart:
    """In order. `values`: positive for rows, whose lanes are in the order of their ids; minus
    their count for others."""
    order = np.lexsort((ids, buckets_of(hashes_of(ids))))
    number = np.cumsum(values > 0) - 1
    rows = torch.from_numpy(number[order][values[order] > 0])
    return TablePart(
        ids[order],
        np.maximum(-values[order], 0),
        None if last is None else last[order],
        {name: lane.index_select(0, rows) for name, lane in lanes.items()},
    )


def bucket_digests(part: TablePart) -> dict[int, bytes]:
    """Of each bucket that has anything in it. Tables with the same history have the same, whatever
    the order of their slots, and however many servers they are spread over."""
    buckets = buckets_of(hashes_of(part.ids))
    found: dict[int, bytes] = {}
    rows = np.concatenate([[0], np.cumsum(part.counts == 0)])
    bounds = np.searchsorted(buckets, np.arange(BUCKETS + 1))
    lanes = [lane.numpy() for _, lane in sorted(part.lanes.items())]
    entries = [part.ids, part.counts, *([] if part.last is None else [part.last])]
    for bucket in np.unique(buckets):
        a, b = bounds[bucket], bounds[bucket + 1]
        digest = xxhash.xxh3_128()
        for column in entries:
            digest.update(column[a:b].tobytes())
        for lane in lanes:
            digest.update(lane[rows[a] : rows[b]].tobytes())
        found[int(bucket)] = digest.digest()
    return found


def whole_digest(digests: Mapping[int, bytes]) -> str:
    """Of all buckets, wherever they are kept."""
    digest = xxhash.xxh3_128()
    for bucket, of_bucket in sorted(digests.items()):
        digest.update(bucket.to_bytes(2, "little") + of_bucket)
    return digest.hexdigest()


def groups_of(
    buckets: NDArray[np.int64], entries: NDArray[np.int64], most: int = GROUP
) -> list[NDArray[np.int64]]:
    """In which buckets are gone through, so that nobody waits long for one; `entries`: of all.
    `most`: buckets in one."""
    groups: list[NDArray[np.int64]] = []
    first, many = 0, np.cumsum(entries[buckets])
    while first < len(buckets):
        before = many[first - 1] if first else 0
        stop = max(first + 1, int(np.searchsorted(many, before + GROUP_ENTRIES, side="right")))
        groups.append(buckets[first : min(stop, first + most)])
        first += len(groups[-1])
    return groups
