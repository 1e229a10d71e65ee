# SPDX-License-Identifier: Apache-2.0
"""Gradients by position → gradients by id, and the sum of two of those.

Positions of the same id are added in their order, the first as it is: that is what a micro-batch's
gradient means here (`coalesce()` adds in another order, and has other bits). In the tree of
micro-batches a row that only one side has goes on unchanged, never as row + 0.0, which would turn
-0.0 into 0.0; so the sum does not depend on which ids others had.

One native pass does each of these (row_passes.py). Without it whole arrays are sorted, which is
faster than any table made of numpy: its sort takes a few ns per id.
"""

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import embedding_bag

from manyhands.training.state.rows.row_hash import Ids, buckets_of, hashes_of
from manyhands.training.state.rows.row_passes import row_passes

_NONE = cast(Ids, np.empty(0, np.int64))


@dataclass(frozen=True, slots=True)
class GradientRows:
    """Of some ids, each once, in ascending order; `rows` is [ids, columns], float32."""

    ids: Ids
    rows: Tensor

    def tensors(self) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(self.ids), self.rows


Grouped = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Positions, those of the smallest id first, and of each id in their order; where each begins."""


@dataclass(frozen=True, slots=True)
class GroupedIds:
    """Which ids there are at some positions: once for the rows to be read, and once more for the
    gradients to be summed."""

    distinct: Ids
    """In ascending order."""
    each: NDArray[np.int32 | np.int64]
    """Of each position, which of them is there."""
    found: Grouped | NDArray[np.int32]
    """Without native code, and with it: of each of them, its first position."""

    def spread(self, rows: Tensor) -> Tensor:
        """From one row for each id to one for each position."""
        if (passes := row_passes()) is not None and not isinstance(self.found, tuple):
            return passes.spread(rows, cast(Any, self.each))
        return rows.index_select(0, torch.from_numpy(self.each))


def group_ids(ids: Ids) -> GroupedIds:
    """Of at least one position."""
    if (passes := row_passes()) is not None and len(ids) < 1 << 30:
        return GroupedIds(*passes.group(ids))
    order, starts = positions_by_id(ids)
    each = np.empty(len(ids), np.int64)
    each[order] = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(ids)))
    return GroupedIds(ids.take(order.take(starts)), each, (order, starts))


def sum_positions(ids: Ids, grads: Tensor, grouped: GroupedIds | None = None) -> GradientRows:
    """The gradient of one micro-batch, of whose positions `ids` are looked up and `grads` [n, dim]
    the gradients are. `grouped`: `group_ids(ids)`, where that is known."""
    if len(ids) == 0:
        return GradientRows(_NONE, grads)
    grouped = grouped or group_ids(np.ascontiguousarray(ids))
    passes, found = row_passes(), grouped.found
    if passes is not None and not isinstance(found, tuple):
        return GradientRows(
            grouped.distinct, passes.sum(grads.contiguous(), cast(Any, grouped.each), found)
        )
    assert isinstance(found, tuple)
    return GradientRows(grouped.distinct, _sum_groups(*found, grads))


def _sum_groups(order: NDArray[np.int64], starts: NDArray[np.int64], grads: Tensor) -> Tensor:
    first = torch.from_numpy(order.take(starts))
    if len(starts) == len(order):
        return grads.index_select(0, first)
    sizes = np.diff(starts, append=len(order))
    rows = embedding_bag(
        torch.from_numpy(order), grads, torch.from_numpy(starts), mode="sum"
    )  # adds in order, from 0.0 on
    single = torch.from_numpy(np.flatnonzero(sizes == 1))
    rows.index_copy_(0, single, grads.index_select(0, first.index_select(0, single)))
    _restore_signs(rows, sizes, order, starts, grads)
    return rows


def positions_by_id(ids: Ids) -> Grouped:
    """An id and its position are sorted as one number, where both fit into 63 bits. Else ids are
    sorted first: numpy's fastest way to do that forgets the order of equals, so each position is
    sorted once more, behind the number of its id: still several times faster than a stable sort.
    """
    bits, low = (len(ids) - 1).bit_length(), int(ids.min())
    fits = int(ids.max()) - low < 1 << (63 - bits)
    if fits:
        both = (ids - low << bits) | np.arange(len(ids))
        both.sort()
        order, sorted_ids = both & (1 << bits) - 1, both >> bits
    else:
        order = np.argsort(ids)
        sorted_ids = ids.take(order)
    new = np.empty(len(ids), np.bool_)
    new[0] = True
    np.not_equal(sorted_ids[1:], sorted_ids[:-1], out=new[1:])
    starts = np.flatnonzero(new)
    if not fits and len(starts) < len(ids):
        numbered = (np.cumsum(new) << 32) | order
        numbered.sort()
        order = numbered & 0xFFFFFFFF
    return order, starts


def _restore_signs(
    rows: Tensor,
    sizes: NDArray[np.int64],
    order: NDArray[np.int64],
    starts: NDArray[np.int64],
    grads: Tensor,
) -> None:
    """0.0 + -0.0 is 0.0, but the sum of nothing but -0.0 is -0.0."""
    zeros = rows == 0
    if not bool(zeros.any()):
        return
    negative = ((grads == 0) & grads.signbit()).to(rows.dtype)
    count = embedding_bag(torch.from_numpy(order), negative, torch.from_numpy(starts), mode="sum")
    many = torch.from_numpy(sizes)[:, None]
    rows.masked_fill_(zeros & (many > 1) & (count == many), -0.0)


def rows_in(gradient: GradientRows, buckets: NDArray[np.bool_]) -> GradientRows:
    """Those of buckets that are marked."""
    if buckets.all():
        return gradient
    if (passes := row_passes()) is not None:
        return GradientRows(*passes.select(gradient.ids, gradient.rows.contiguous(), buckets))
    mine = np.flatnonzero(buckets.take(buckets_of(hashes_of(gradient.ids))))
    rows = gradient.rows.index_select(0, torch.from_numpy(mine))
    return GradientRows(gradient.ids.take(mine), rows)


def merge_rows(left: GradientRows, right: GradientRows) -> GradientRows:
    """left + right, where both have a row; otherwise the one there is."""
    if len(left.ids) == 0 or len(right.ids) == 0:
        return right if len(left.ids) == 0 else left
    if (passes := row_passes()) is not None:
        return GradientRows(
            *passes.merge(left.ids, left.rows.contiguous(), right.ids, right.rows.contiguous())
        )
    place = np.searchsorted(left.ids, right.ids)
    both = left.ids.take(place, mode="clip") == right.ids
    ids = np.concatenate([left.ids, right.ids[~both]])
    rows = torch.cat([left.rows, right.rows[torch.from_numpy(~both)]])
    shared = torch.from_numpy(np.flatnonzero(both))
    at = torch.from_numpy(place[both])
    rows.index_copy_(0, at, rows.index_select(0, at) + right.rows.index_select(0, shared))
    order = np.argsort(ids)
    return GradientRows(ids.take(order), rows.index_select(0, torch.from_numpy(order)))
