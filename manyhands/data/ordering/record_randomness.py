# SPDX-License-Identifier: Apache-2.0
"""Random numbers that belong to a record.

Every number is a hash of (seed, epoch, record id, name, counter). Nothing is drawn in a sequence,
so a record gets the same numbers in any batch, on any worker, in any order, and again in a replay.

Invariant: only integer arithmetic and single IEEE operations on elements (no library's log or sin,
no sums over a batch), so a record's bits do not depend on how many others are in the array.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from manyhands.data.columns.array_types import Positions

Shape = tuple[int, ...]
ColumnBatch = dict[str, Any]
"""A batch, by column: tensors, or what else is in it."""

_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True, slots=True)
class Draw:
    """Random numbers for the records of one batch, by name."""

    seed: int
    epoch: int
    ids: Positions
    """The records' `_id`."""
    training: bool = True
    """False for held-out records, which transforms should not vary."""
    path: tuple[int | str, ...] = ()
    """In whose name numbers are drawn: the steps of a `Compose` must not draw the same ones."""

    def within(self, name: int | str) -> "Draw":
        return Draw(self.seed, self.epoch, self.ids, self.training, (*self.path, name))

    def uniform(self, name: str, shape: Shape = ()) -> torch.Tensor:
        """float32 in [0, 1), of shape (records, *shape)."""
        high = self.bits(name, shape) >> np.uint64(40)
        return torch.from_numpy(high.astype(np.float32) * np.float32(2.0**-24))

    def chance(self, name: str, p: float, shape: Shape = ()) -> torch.Tensor:
        """True with probability p."""
        return self.uniform(name, shape) < p

    def below(self, name: str, bound: int, shape: Shape = ()) -> torch.Tensor:
        """int64 in [0, bound), for bounds below 2**32."""
        scaled = (self.bits(name, shape) >> np.uint64(32)) * np.uint64(bound)
        return torch.from_numpy((scaled >> np.uint64(32)).astype(np.int64))

    def normal(self, name: str, shape: Shape = ()) -> torch.Tensor:
        """float32 from the normal distribution of mean 0 and deviation 1."""
        fraction = (self.bits(name, shape) >> np.uint64(11)).astype(np.float64)
        return torch.from_numpy(_normal_quantile((fraction + 0.5) * 2.0**-53).astype(np.float32))

    def bits(self, name: str, shape: Shape = ()) -> NDArray[np.uint64]:
        """64 random bits for each element, of shape (records, *shape)."""
        key = repr((self.seed, self.epoch, *self.path, name)).encode()
        start = np.frombuffer(hashlib.blake2b(key, digest_size=8).digest(), np.uint64)
        records = _mixed(self.ids.astype(np.uint64) * _STEP + start)
        counters = np.arange(1, prod(shape) + 1, dtype=np.uint64) * _STEP
        return _mixed(records[:, None] + counters).reshape(len(self.ids), *shape)


Transform = Callable[[ColumnBatch, Draw], ColumnBatch]
"""Changes a batch; random only through the `Draw` it is given."""


def _mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The last stage of splitmix64; overflow wraps, which is meant."""
    x = (x ^ (x >> np.uint64(30))) * _FIRST
    x ^= x >> np.uint64(27)
    x *= _SECOND
    return x ^ (x >> np.uint64(31))


# P. J. Acklam's rational approximation of the normal quantile; its relative error is below 1.2e-9.
_CENTRE = (
    (
        -39.69683028665376,
        220.9460984245205,
        -275.9285104469687,
        138.357751867269,
        -30.66479806614716,
        2.506628277459239,
    ),
    (
        -54.47609879822406,
        161.5858368580409,
        -155.6989798598866,
        66.80131188771972,
        -13.28068155288572,
        1.0,
    ),
)
_TAILS = (
    (
        -0.007784894002430293,
        -0.3223964580411365,
        -2.400758277161838,
        -2.549732539343734,
        4.374664141464968,
        2.938163982698783,
    ),
    (0.007784695709041462, 0.3224671290700398, 2.445134137142996, 3.754408661907416, 1.0),
)
_TAIL = 0.02425


def _normal_quantile(p: NDArray[np.float64]) -> NDArray[np.float64]:
    centred = p - 0.5
    square = centred * centred
    found = centred * _ratio(_CENTRE, square)
    tail = np.abs(centred) > 0.5 - _TAIL
    side = centred[tail]
    q = np.sqrt(-2.0 * logarithm(0.5 - np.abs(side)))
    found[tail] = np.where(side < 0, 1.0, -1.0) * _ratio(_TAILS, q)
    return found


def logarithm(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """The logarithm, from operations that every processor rounds alike."""
    mantissa, exponent = np.frexp(x)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    series = _polynomial([1.0 / k for k in range(31, 0, -2)], s * s)
    return exponent * 0.6931471805599453 + 2.0 * s * series


def _ratio(
    polynomials: tuple[tuple[float, ...], tuple[float, ...]], x: NDArray[np.float64]
) -> NDArray[np.float64]:
    return _polynomial(polynomials[0], x) / _polynomial(polynomials[1], x)


def _polynomial(
    coefficients: tuple[float, ...] | list[float], x: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Highest power first."""
    total = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        total *= x
        total += coefficient
    return total
