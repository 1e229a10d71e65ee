# SPDX-License-Identifier: Apache-2.0
"""Quantiles of numbers from one pass: counts of values that agree in their leading bits.

Floats are counted as integers in the same order. When there are more than CELLS different ones,
the last bit of all of them is ignored, then the last two, and so on. How many bits are ignored in
the end depends only on the set of values, so the sketch does not depend on order or cutting. Within
a cell values are taken to be spread evenly: quantiles are off by at most a cell, which for anything
that looks like measurements holds about 1/10,000 of the values.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from manyhands.data.statistics.exact_quantiles import Ints, disordered, ordered

CELLS = 1 << 16


class Sketch(msgspec.Struct, frozen=True):
    level: int
    """How many trailing bits are ignored."""
    cells: bytes
    """int64, rising: what is left of the values' keys."""
    counts: bytes
    """int64."""

    def quantiles(
        self, fractions: Sequence[float], least: float, most: float
    ) -> NDArray[np.float64]:
        cells, counts = _ints(self.cells), _ints(self.counts)
        low = np.fmax(disordered(cells << self.level), least)
        high = np.fmin(disordered((cells << self.level) | ((1 << self.level) - 1)), most)
        after = np.cumsum(counts)
        ranks = np.asarray(fractions) * (after[-1] - 1)
        place = np.minimum(np.searchsorted(after, ranks, "right"), len(cells) - 1)
        inside = (ranks - (after[place] - counts[place]) + 0.5) / counts[place]
        inside = np.minimum(inside, 1.0)
        low, high = low[place], np.fmax(high, low)[place]
        between = low * (1 - inside) + high * inside
        return np.clip(np.where(low == high, low, between), least, most)


def sketch(values: NDArray[Any]) -> Sketch:
    """Of finite numbers."""
    keys, counts = np.unique(ordered(values.astype(np.float64)), return_counts=True)
    return _coarse(0, keys, counts.astype(np.int64))


def merged(parts: Sequence[Sketch]) -> Sketch:
    level = max(p.level for p in parts)
    cells = np.concatenate([_ints(p.cells) >> (level - p.level) for p in parts])
    counts = np.concatenate([_ints(p.counts) for p in parts])
    order = np.argsort(cells, kind="stable")
    return _coarse(level, cells[order], counts[order])


def _coarse(level: int, cells: Ints, counts: Ints) -> Sketch:
    """As many bits less as it takes; `cells` are sorted and may repeat."""
    more, enough = 0, 64
    while more < enough:
        middle = (more + enough) // 2
        if _distinct(cells >> middle) > CELLS:
            more = middle + 1
        else:
            enough = middle
    cells = cells >> more
    first = np.flatnonzero(_fresh(cells))
    sums = np.add.reduceat(counts, first) if len(first) else counts
    return Sketch(level + more, cells[first].tobytes(), sums.tobytes())


def _distinct(cells: Ints) -> int:
    return int(_fresh(cells).sum())


def _fresh(cells: Ints) -> NDArray[np.bool_]:
    return np.insert(cells[1:] != cells[:-1], 0, True) if len(cells) else np.empty(0, np.bool_)


def _ints(data: bytes) -> Ints:
    return np.frombuffer(data, np.int64)
