# SPDX-License-Identifier: Apache-2.0
"""Order without a list: which record stands at a position of an epoch.

`order(seed, epoch, n)` is a permutation of range(n) that is computed, not stored: a keyed Feistel
network over the smallest 4**k >= n, with cycle-walking (a value that falls outside [0, n) is sent
through the network again until it is inside; less than four times on average). Memory is constant,
any position costs the same, and nothing in it knows how many workers there are.

`ShardOrder` is the same over shards, for data that memory does not hold: shards are shuffled, a few
neighbours of that shuffle form a window, and records are permuted within their window. An epoch
then reads each shard once, in one go. It costs one number per shard.

Invariant: for every size and key, the records at positions 0..n-1 are 0..n-1, each once, and what
stands at a position does not depend on which others are asked for with it.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Positions = NDArray[np.int64]
AskedPositions = range | Sequence[int] | Positions

ROUNDS = 6
BLOCK = 8192
"""Values that go through the network together: their intermediate results stay in a cache."""

TABLE_BITS = 12
"""Halves of up to this size are mixed by table; larger tables would not stay in a cache."""

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_2 = np.uint64(0xBF58476D1CE4E5B9)


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


@dataclass(frozen=True, slots=True)
class Permutation:
    size: int
    half_bits: int
    keys: tuple[np.uint64, ...]

    def __getitem__(self, positions: AskedPositions) -> Positions:
        """The records at these positions, in the same order."""
        values = self._network(_array(positions))
        (outside,) = (values >= self.size).nonzero()
        walking = values.take(outside)
        while len(outside):
            walking = self._network(walking)
            values[outside] = walking
            (still,) = (walking >= self.size).nonzero()
            outside, walking = outside.take(still), walking.take(still)
        return values

    def _network(self, values: Positions) -> Positions:
        if len(values) <= BLOCK:
            return self._block(values)
        blocks = [self._block(values[i : i + BLOCK]) for i in range(0, len(values), BLOCK)]
        return np.concatenate(blocks)

    def _block(self, values: Positions) -> Positions:
        """In place throughout: a fresh array for each operation would cost three times as much."""
        left, right = values >> self.half_bits, values & ((1 << self.half_bits) - 1)
        mixed = np.empty_like(left)
        for key in self.keys:
            if self.half_bits <= TABLE_BITS:
                _table(key, self.half_bits).take(right, out=mixed, mode="clip")
            else:
                mixed[:] = _mix(right, key, self.half_bits)
            left ^= mixed
            left, right = right, left
        left <<= self.half_bits
        left |= right
        return left


@lru_cache(maxsize=4 * ROUNDS)
def _table(key: np.uint64, bits: int) -> Positions:
    """`_mix` of every half there is: to look it up is quicker than to compute it."""
    return _mix(np.arange(1 << bits), key, bits)


def _mix(half: Positions, key: np.uint64, bits: int) -> Positions:
    """A hash of 64 bits (multiply, shift, xor), cut to `bits`; overflow wraps, which is meant."""
    x = (half.astype(np.uint64) ^ key) * _MULTIPLIER
    x ^= x >> np.uint64(29)
    x *= _MULTIPLIER_2
    x ^= x >> np.uint64(32)
    return (x & np.uint64((1 << bits) - 1)).astype(np.int64)


def _array(positions: AskedPositions) -> Positions:
    if isinstance(positions, range):  # which numpy would walk, number by number
        return np.arange(positions.start, positions.stop, positions.step, dtype=np.int64)
    return np.asarray(positions, dtype=np.int64)


def permutation(size: int, *key: int | str) -> Permutation:
    """The permutation of range(size) that `key` names."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8 * ROUNDS).digest()
    keys = tuple(np.uint64(k) for k in np.frombuffer(digest, dtype=np.uint64))
    half_bits = max(1, ((max(size, 2) - 1).bit_length() + 1) // 2)
    return Permutation(size, half_bits, keys)


def order(seed: int, epoch: int, size: int) -> Permutation:
    """The order in which epoch `epoch` visits `size` records."""
    return permutation(size, "order", seed, epoch)


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
        asked = _array(positions)
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
