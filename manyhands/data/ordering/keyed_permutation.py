# SPDX-License-Identifier: Apache-2.0
"""A permutation of range(n) that is computed, not stored.

It is a keyed Feistel network over the smallest 4**k >= n, with cycle-walking (a value that falls
outside [0, n) is sent through the network again until it is inside; less than four times on
average). Memory is constant, and any position costs the same.

Invariant: for every size and key, the values at positions 0..n-1 are 0..n-1, each once, and what
stands at a position does not depend on which others are asked for with it.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from manyhands.data.columns.array_types import Positions

AskedPositions = range | Sequence[int] | Positions

ROUNDS = 6
BLOCK = 8192
"""Values that go through the network together: their intermediate results stay in a cache."""

TABLE_BITS = 12
"""Halves of up to this size are mixed by table; larger tables would not stay in a cache."""

_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_2 = np.uint64(0xBF58476D1CE4E5B9)


@dataclass(frozen=True, slots=True)
class Permutation:
    size: int
    half_bits: int
    keys: tuple[np.uint64, ...]

    def __getitem__(self, positions: AskedPositions) -> Positions:
        """The records at these positions, in the same order."""
        values = self._network(as_positions(positions))
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


def as_positions(positions: AskedPositions) -> Positions:
    if isinstance(positions, range):  # which numpy would walk, number by number
        return np.arange(positions.start, positions.stop, positions.step, dtype=np.int64)
    return np.asarray(positions, dtype=np.int64)


def permutation(size: int, *key: int | str) -> Permutation:
    """The permutation of range(size) that `key` names."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8 * ROUNDS).digest()
    keys = tuple(np.uint64(k) for k in np.frombuffer(digest, dtype=np.uint64))
    half_bits = max(1, ((max(size, 2) - 1).bit_length() + 1) // 2)
    return Permutation(size, half_bits, keys)
