# SPDX-License-Identifier: Apache-2.0
"""Order without a list: which record stands at a position of an epoch.

`order(n, key)` is a permutation of range(n) that is computed, not stored: a keyed Feistel network
over the smallest 4**k >= n, with cycle-walking (a value that falls outside [0, n) is sent through
the network again until it is inside; less than four times on average). Memory is constant, any
position costs the same, and nothing in it knows how many workers there are.

Invariant: for every n and key, {order(n, key)[i] for i in range(n)} == set(range(n)).
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Positions = NDArray[np.int64]

ROUNDS = 6
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True)
class Permutation:
    size: int
    half_bits: int
    keys: tuple[np.uint64, ...]

    def __getitem__(self, positions: range | Sequence[int] | Positions) -> Positions:
        """The records at these positions, in the same order."""
        values = np.asarray(positions, dtype=np.uint64)
        values = self._network(values)
        outside = values >= self.size
        while outside.any():
            values[outside] = self._network(values[outside])
            outside = values >= self.size
        return values.astype(np.int64)

    def _network(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        bits = np.uint64(self.half_bits)
        mask = np.uint64((1 << self.half_bits) - 1)
        left, right = values >> bits, values & mask
        for key in self.keys:
            left, right = right, left ^ (_mix(right, key) & mask)
        return (left << bits) | right


def _mix(x: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
    """A hash of 64 bits (multiply, shift, xor); overflow wraps, which is meant."""
    x = (x ^ key) * _MULTIPLIER
    x ^= x >> np.uint64(29)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    return x ^ (x >> np.uint64(32))


def permutation(size: int, *key: int | str) -> Permutation:
    """The permutation of range(size) that `key` names."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8 * ROUNDS).digest()
    keys = tuple(np.uint64(k) for k in np.frombuffer(digest, dtype=np.uint64))
    half_bits = max(1, ((max(size, 2) - 1).bit_length() + 1) // 2)
    return Permutation(size, half_bits, keys)


def order(seed: int, epoch: int, size: int) -> Permutation:
    """The order in which epoch `epoch` visits `size` records."""
    return permutation(size, "order", seed, epoch)
