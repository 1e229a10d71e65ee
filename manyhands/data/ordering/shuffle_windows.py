# SPDX-License-Identifier: Apache-2.0
"""The order of an epoch for data that memory does not hold: a shuffle in windows of shards.

Shards are shuffled, a few neighbours of that shuffle form a window, and records are permuted within
their window. An epoch then reads each shard once, in one go. It costs one number per shard.

Invariant: as with any keyed permutation, the records at positions 0..n-1 are 0..n-1, each once, and
what stands at a position does not depend on which others are asked for with it.
"""

from collections.abc import Sequence

import numpy as np

from manyhands.data.columns.array_types import Positions
from manyhands.data.ordering.epoch_order import order
from manyhands.data.ordering.keyed_permutation import AskedPositions, as_positions, permutation


class Windows:
    """Which shards are read together."""

    def __init__(self, row: Positions, cuts: Positions) -> None:
        """Shards in the order in which they are read, and where that row is cut (`cuts_of`)."""
        self.shards: list[list[int]] = [part.tolist() for part in np.split(row, cuts[1:-1])]
        """By window."""
        self.of: dict[int, int] = {s: w for w, part in enumerate(self.shards) for s in part}


class ShardOrder:
    """The order in which an epoch visits records that lie in shards.

    Records are numbered over all shards, in the order of `sizes`. A window is a run of shuffled
    shards with at least `window` records; what is left over at the end joins the last. Where all
    records fit in one window this is `order`, whatever the shards.
    """

    def __init__(
        self, seed: int, epoch: int, sizes: Sequence[int] | Positions, window: int
    ) -> None:
        self.seed, self.epoch = seed, epoch
        self.size = int(sum(sizes))
        shards = permutation(len(sizes), "shards", seed, epoch)[range(len(sizes))]
        self._first = starts_of(sizes)[shards]
        """Of each shuffled shard: its first record."""
        self._starts = starts_of(np.asarray(sizes, dtype=np.int64)[shards])
        """Of each shuffled shard, and of their end: its first place in the row of all of them."""
        self._cuts = cuts_of(self._starts, window)
        self._window_starts = self._starts[self._cuts]
        self.windows = Windows(shards, self._cuts)

    def __getitem__(self, positions: AskedPositions) -> Positions:
        """The records at these positions, in the same order."""
        asked = as_positions(positions)
        if len(self._cuts) == 2:
            return order(self.seed, self.epoch, self.size)[asked]
        windows = np.searchsorted(self._window_starts, asked, side="right") - 1
        found = np.empty_like(asked)
        for window in np.unique(windows):
            here = windows == window
            found[here] = self._in_window(int(window), asked[here])
        return found

    def _in_window(self, window: int, asked: Positions) -> Positions:
        start, stop = self._window_starts[window : window + 2].tolist()
        mixed = permutation(stop - start, "order", self.seed, self.epoch, window)[asked - start]
        mixed += start
        here = slice(self._cuts[window], self._cuts[window + 1])
        shard = np.searchsorted(self._starts[here], mixed, side="right") - 1
        return self._first[here][shard] + (mixed - self._starts[here][shard])


def starts_of(sizes: Sequence[int] | Positions) -> Positions:
    """Where each begins when they stand in a row, and where the last one ends."""
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])


def cuts_of(starts: Positions, window: int) -> Positions:
    """A row of shards cut in windows: from which shard to which, beginning with 0."""
    total, cuts = int(starts[-1]), [0]
    while total - (start := int(starts[cuts[-1]])) >= 2 * max(1, window):
        cuts.append(int(np.searchsorted(starts, start + max(1, window))))
    if len(cuts) > 1 and total - int(starts[cuts[-1]]) < window:
        cuts.pop()
    return np.asarray([*cuts, len(starts) - 1])
