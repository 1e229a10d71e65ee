# SPDX-License-Identifier: Apache-2.0
"""Order without a list: which record stands at a position of an epoch.

`order(seed, epoch, n)` is a keyed permutation; nothing in it knows how many workers there are. For
data that memory does not hold, `shuffle_windows` has another, over shards.
"""

from typing import NamedTuple, Protocol

from manyhands.data.columns.array_types import Positions
from manyhands.data.ordering.keyed_permutation import AskedPositions, Permutation, permutation


class RecordVisit(NamedTuple):
    """What the records of a batch are fetched for; transforms draw their random numbers from it."""

    seed: int = 0
    epoch: int = 0
    training: bool = True
    """Held-out records are visited as they are: what only varies them is left out."""


FIRST = RecordVisit()


class Order(Protocol):
    def __getitem__(self, positions: AskedPositions, /) -> Positions:
        """The records at these positions, in the same order."""
        ...


def order(seed: int, epoch: int, size: int) -> Permutation:
    """The order in which epoch `epoch` visits `size` records."""
    return permutation(size, "order", seed, epoch)
