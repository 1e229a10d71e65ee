# SPDX-License-Identifier: Apache-2.0
"""Rows of open shards → arrays of a batch. Pure; every result is a fresh array.

Integers are given as int64 and floats as float32, except that bytes in lists (images) stay bytes.
Rows of different lengths are filled up with zeros, or follow each other without a gap.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from manyhands.data.columns.array_types import AnyArray, Positions
from manyhands.data.shards.shard_columns import Ragged

LONG = 300
"""Rows of so many elements are copied one by one; shorter ones by one indexing operation."""

MASKED_WIDTH = 128
"""Up to this many elements, what is behind a row's end is blanked by a table of masks."""

_FLOAT, _INT, _BYTE = np.dtype(np.float32), np.dtype(np.int64), np.dtype(np.uint8)


class Pick(NamedTuple):
    """The rows of a batch that lie in one shard."""

    rows: Positions
    where: Positions | slice
    """Their places in the batch; a slice if it is all of it."""


Picks = Sequence[Pick]


def take_fixed(columns: Sequence[AnyArray], picks: Picks, size: int) -> AnyArray:
    """Rows of columns whose values all have the same shape."""
    first = columns[0]
    dtype = _given_as(first.dtype, first.ndim)
    if len(picks) == 1:
        return first.take(picks[0].rows, axis=0).astype(dtype, copy=False)
    out = np.empty((size, *first.shape[1:]), dtype)
    for column, pick in zip(columns, picks, strict=True):
        out[pick.where] = column.take(pick.rows, axis=0)
    return out


def take_padded(
    columns: Sequence[Ragged], picks: Picks, size: int, width: int | None
) -> tuple[AnyArray, NDArray[np.int64]]:
    """Rows filled up with zeros to `width` (None: the longest of them), and their lengths."""
    starts, lengths = _extents(columns, picks, size)
    if width is None:
        width = int(lengths.max(initial=0))
    else:
        np.minimum(lengths, width, out=lengths)
    values = columns[0].values
    if width and all(column.length == width for column in columns):
        rows = take_fixed([column.values.reshape(-1, width) for column in columns], picks, size)
        return rows, lengths
    if width >= LONG:
        rows = np.zeros((size, width), values.dtype)
        for column, pick, at in zip(columns, picks, starts, strict=True):
            _copy_rows(column.values, at, lengths[pick.where], rows, pick.where)
    else:
        rows = _slices(columns[0].values, starts[0], width)
        if len(picks) > 1:
            first, rows = rows, np.empty((size, width), values.dtype)
            rows[picks[0].where] = first
        for column, pick, at in zip(columns[1:], picks[1:], starts[1:], strict=True):
            rows[pick.where] = _slices(column.values, at, width)
        _blank(rows, lengths)
    return rows.astype(_given_as(values.dtype, 2), copy=False), lengths


def take_flat(
    columns: Sequence[Ragged], picks: Picks, size: int
) -> tuple[AnyArray, NDArray[np.int64]]:
    """Rows one after the other, and where each begins and the last one ends."""
    starts, lengths = _extents(columns, picks, size)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    values = columns[0].values
    out = np.empty(int(offsets[-1]), _given_as(values.dtype, 2))
    for column, pick, at in zip(columns, picks, starts, strict=True):
        length = lengths[pick.where]
        within = np.arange(int(length.sum())) - np.repeat(np.cumsum(length) - length, length)
        target = within + np.repeat(offsets[:-1][pick.where], length)
        out[target] = column.values.take(within + np.repeat(at, length))
    return out, offsets


def take_strings(columns: Sequence[Ragged], picks: Picks, size: int) -> list[str]:
    found = [""] * size
    for column, pick in zip(columns, picks, strict=True):
        text = column.values.data
        starts, ends = column.offsets.take(pick.rows), column.offsets.take(pick.rows + 1)
        places = np.arange(size)[pick.where]
        for i, a, b in zip(places.tolist(), starts.tolist(), ends.tolist(), strict=True):
            found[i] = str(text[a:b], "utf-8")
    return found


def _given_as(dtype: np.dtype[Any], dims: int) -> np.dtype[Any]:
    """The type in which a batch holds values of this type."""
    if dtype.kind == "f":
        return _FLOAT
    if dtype.kind in "iu" and not (dtype == _BYTE and dims > 1):
        return _INT
    return dtype


def _extents(
    columns: Sequence[Ragged], picks: Picks, size: int
) -> tuple[list[AnyArray], NDArray[np.int64]]:
    """By shard: where rows begin in its values. By place in the batch: all lengths."""
    starts: list[AnyArray] = []
    lengths = np.empty(size, np.int64)
    for column, pick in zip(columns, picks, strict=True):
        at = column.offsets.take(pick.rows)
        lengths[pick.where] = column.offsets.take(pick.rows + 1) - at
        starts.append(at)
    return starts, lengths


def _slices(values: AnyArray, starts: AnyArray, width: int) -> AnyArray:
    """values[s : s + width] for each of `starts`; what is behind a row's end is anything."""
    if width == 0 or len(values) == 0:
        return np.zeros((len(starts), width), values.dtype)
    if int(starts.max(initial=0)) + width > len(values):  # at the end of the shard
        return values.take(starts[:, None] + np.arange(width), mode="clip")
    # Each slice as one element of an array of overlapping elements: three times as fast as indices.
    size = values.itemsize
    count = len(values) - width + 1
    windows = np.ndarray((count,), f"V{width * size}", values.data, strides=(size,))
    return windows[starts.astype(np.int64)].view(values.dtype).reshape(len(starts), width)


def _blank(rows: AnyArray, lengths: AnyArray) -> None:
    """Zero behind each row's end. By bits, because zero times what is there may be NaN."""
    width = rows.shape[1]
    if width <= MASKED_WIDTH:
        bits = rows.view(f"u{rows.itemsize}")
        bits &= _masks(width, rows.itemsize).take(lengths, axis=0)
    else:
        rows[np.arange(width) >= lengths[:, None]] = 0


@lru_cache(maxsize=MASKED_WIDTH)
def _masks(width: int, itemsize: int) -> AnyArray:
    """By length of a row: all bits set in the elements that it has."""
    inside = np.arange(width) < np.arange(width + 1)[:, None]
    return -inside.astype(f"i{itemsize}").view(f"u{itemsize}")


def _copy_rows(
    values: AnyArray, starts: AnyArray, lengths: AnyArray, out: AnyArray, where: Positions | slice
) -> None:
    """Copy each row to its place in the batch, as memory is copied."""
    size = values.itemsize
    source, target = values.view(np.uint8).data, out.reshape(-1).view(np.uint8).data
    places = (np.arange(len(out))[where] * out.strides[0]).tolist()
    begins = (starts.astype(np.int64) * size).tolist()
    for to, start, n in zip(places, begins, (lengths * size).tolist(), strict=True):
        target[to : to + n] = source[start : start + n]
