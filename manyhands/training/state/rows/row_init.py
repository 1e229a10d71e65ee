# SPDX-License-Identifier: Apache-2.0
"""A row's first values: a function of (seed, name of the table, id), and of nothing else.

So they are the same whoever touches a row first, in whatever company, on however many servers, and
again when a row has expired and comes back; and a row that nobody has trained need not be kept to
be read. Each value is one of 65,536 quantiles of its distribution, chosen by 16 bits of a hash:
a few operations on whole arrays, hundreds of times as fast as a generator per row. (The largest of
a normal distribution is therefore 4.3 standard deviations away, and the variance is made exact.)
"""

import hashlib
import math
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import cast

import numpy as np
from numpy.typing import NDArray

from manyhands.training.state.rows.row_hash import Ids, scramble
from manyhands.training.state.rows.row_passes import row_passes
from manyhands.values.errors import ConfigError

QUANTILES = 1 << 16
_STRIDE = np.uint64(0x9E3779B97F4A7C15)

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class NormalInit:
    std: float = 1.0

    def __post_init__(self) -> None:
        _check(math.isfinite(self.std) and self.std > 0, f"normal(std={self.std})")

    def quantiles(self) -> Floats:
        return (_normal_quantiles() * self.std).astype(np.float32)


@dataclass(frozen=True, slots=True)
class UniformInit:
    low: float = -1.0
    high: float = 1.0

    def __post_init__(self) -> None:
        fits = math.isfinite(self.high - self.low) and self.low < self.high
        _check(fits, f"uniform({self.low}, {self.high})")

    def quantiles(self) -> Floats:
        middles = (np.arange(QUANTILES) + 0.5) / QUANTILES
        return (self.low + middles * (self.high - self.low)).astype(np.float32)


@dataclass(frozen=True, slots=True)
class ConstantInit:
    value: float = 0.0

    def __post_init__(self) -> None:
        _check(math.isfinite(self.value), f"constant({self.value})")


RowInit = NormalInit | UniformInit | ConstantInit


def _check(fits: bool, what: str) -> None:
    if not fits:
        raise ConfigError(
            f"rows cannot begin as {what}: a standard deviation is positive, the bounds of a "
            "uniform distribution are in ascending order, and all of them are finite."
        )


class FirstRows:
    """The first rows of one table, `dim` columns wide."""

    def __init__(self, init: RowInit, dim: int, *, seed: int, table: str) -> None:
        self.init, self.dim = init, dim
        key = hashlib.blake2b(f"{seed}\0{table}".encode(), digest_size=8).digest()
        self._key = np.uint64(int.from_bytes(key, "little"))
        words = -(-dim // 4)  # each word has the choice for four columns
        self._strides = np.arange(1, words + 1, dtype=np.uint64) * _STRIDE
        self._quantiles = None if isinstance(init, ConstantInit) else init.quantiles()

    def __call__(self, ids: Ids) -> Floats:
        if isinstance(self.init, ConstantInit):
            return np.full((len(ids), self.dim), self.init.value, np.float32)
        if (passes := row_passes()) is not None:
            quantiles = cast(Floats, self._quantiles)
            return passes.first(np.ascontiguousarray(ids), int(self._key), quantiles, self.dim)
        of_rows = scramble(scramble(ids.view(np.uint64) ^ self._key) + self._key)
        words = scramble((of_rows[:, None] + self._strides).reshape(-1))
        choice = words.astype("<u8", copy=False).view("<u2")
        choice = choice.reshape(len(ids), 4 * len(self._strides))
        return cast(Floats, self._quantiles).take(choice[:, : self.dim])


@cache
def _normal_quantiles() -> NDArray[np.float64]:
    """Of the normal distribution, scaled so that their own variance is 1."""
    normal, half = NormalDist(), QUANTILES // 2
    upper = [normal.inv_cdf((half + k + 0.5) / QUANTILES) for k in range(half)]
    scale = math.sqrt(math.fsum(x * x for x in upper) / half)
    positive = np.array(upper) / scale
    return np.concatenate([-positive[::-1], positive])
