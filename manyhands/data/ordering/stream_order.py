# SPDX-License-Identifier: Apache-2.0
"""The order in which a stream's records are used: as they come, or shuffled within windows.

Records are numbered as they come. Window w holds numbers [w * window, (w + 1) * window), and is
permuted by a key of (seed, epoch, w): so what stands at a position is known before anything is
read, and whoever reads it holds two windows at the most.

Invariant: as with any keyed permutation, the records at positions 0..n-1 are 0..n-1, each once, and
what stands at a position does not depend on which others are asked for with it.
"""

import numpy as np

from manyhands.data.columns.array_types import Positions
from manyhands.data.ordering.keyed_permutation import AskedPositions, as_positions, permutation

MOST_WINDOWS = 4


class StreamOrder:
    def __init__(self, seed: int, epoch: int, size: int, window: int) -> None:
        self.seed, self.epoch, self.size, self.window = seed, epoch, size, window
        self._kept: dict[int, Positions] = {}

    def __getitem__(self, positions: AskedPositions) -> Positions:
        """The records at these positions, in the same order."""
        asked = as_positions(positions)
        if self.window <= 1:
            return asked
        windows = asked // self.window
        found = np.empty_like(asked)
        for window in np.unique(windows).tolist():
            here, start = windows == window, window * self.window
            found[here] = self._window(window)[asked[here] - start] + start
        return found

    def _window(self, window: int) -> Positions:
        """All of it at once, and the last few are kept: neighbours are asked for one by one."""
        if window not in self._kept:
            size = min(self.window, self.size - window * self.window)
            mixed = permutation(size, "stream", self.seed, self.epoch, window)[range(size)]
            self._kept[window] = mixed
            if len(self._kept) > MOST_WINDOWS:
                del self._kept[next(iter(self._kept))]
        return self._kept[window]
