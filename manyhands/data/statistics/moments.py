# SPDX-License-Identifier: Apache-2.0
"""Sums and sums of squares without any rounding, so that their order cannot matter.

Every finite float is a whole number times a power of two. Mantissas are cut in limbs of 18 bits,
limbs and their products are summed for each exponent (small enough for float64 to hold them
exactly), and the sums are put together as one Python integer. Mean and deviation are then rounded
once, from exact fractions: the same bits for any cutting, order or number of workers.
"""

import math
from fractions import Fraction
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

BLOCK = 1 << 15
"""Values at a time: 2**15 products of at most 3 * 2**36 stay below 2**53."""

_SCALE = 1126
"""2**-1126 divides every float: 1074 of the smallest, and 52 more for its mantissa."""


class Moments(msgspec.Struct, frozen=True):
    """Of finite numbers. The sums are integers, as text because they have thousands of bits."""

    count: int = 0
    total: str = "0"
    """In units of 2**-_SCALE, hexadecimal."""
    squares: str = "0"
    """In units of 2**-(2 * _SCALE), hexadecimal."""

    def __add__(self, other: "Moments") -> "Moments":
        total = int(self.total, 16) + int(other.total, 16)
        squares = int(self.squares, 16) + int(other.squares, 16)
        return Moments(self.count + other.count, f"{total:x}", f"{squares:x}")

    @property
    def mean(self) -> float:
        """0.0 of nothing."""
        return float(self._mean()) if self.count else 0.0

    @property
    def deviation(self) -> float:
        """The root of the mean squared distance from the mean."""
        if not self.count:
            return 0.0
        squares = Fraction(int(self.squares, 16), self.count << 2 * _SCALE)
        return _root(squares - self._mean() ** 2)

    def _mean(self) -> Fraction:
        return Fraction(int(self.total, 16), self.count << _SCALE)


def moments(values: NDArray[Any]) -> Moments:
    """Of finite floats or of integers."""
    if values.dtype.kind == "f":
        sums = [_float_sums(values[i : i + BLOCK]) for i in range(0, len(values), BLOCK)]
    else:
        sums = [_int_sums(values[i : i + BLOCK]) for i in range(0, len(values), BLOCK)]
    total, squares = sum(t for t, _ in sums), sum(s for _, s in sums)
    return Moments(len(values), f"{total:x}", f"{squares:x}")


def _int_sums(values: NDArray[Any]) -> tuple[int, int]:
    small = values.dtype.itemsize <= 2 or (int(values.max()) < 1 << 23 and values.min() > -1 << 23)
    values = values.astype(np.int64)
    if small:
        return int(values.sum()) << _SCALE, int(values @ values) << 2 * _SCALE
    high, low = values >> 32, values & 0xFFFFFFFF
    total = (int(high.sum()) << 32) + int(low.sum())
    squares = sum(v * v for v in values.tolist())
    return total << _SCALE, squares << 2 * _SCALE


def _float_sums(values: NDArray[Any]) -> tuple[int, int]:
    fractions, exponents = np.frexp(values.astype(np.float64))
    whole = np.ldexp(fractions, 53).astype(np.int64)
    lowest = int(exponents.min())
    bins = exponents - lowest
    size = np.abs(whole)
    limbs = [(size >> shift & 0x3FFFF).astype(np.float64) for shift in (0, 18, 36)]
    sign = np.sign(whole).astype(np.float64)
    low, middle, high = limbs
    sums = [(sign * limb, 18 * i) for i, limb in enumerate(limbs)]
    products = [
        (low * low, 0),
        (2 * low * middle, 18),
        (2 * low * high + middle * middle, 36),
        (2 * middle * high, 54),
        (high * high, 72),
    ]
    unit = lowest - 53 + _SCALE
    return _gathered(bins, sums, unit, 1), _gathered(bins, products, 2 * unit, 2)


def _gathered(
    bins: NDArray[Any], terms: list[tuple[NDArray[np.float64], int]], unit: int, stride: int
) -> int:
    """The sum of terms * 2**(shift + unit + stride * bin)."""
    total = 0
    for values, shift in terms:
        for bin, part in enumerate(np.bincount(bins, weights=values).tolist()):
            if part:
                total += int(part) << (shift + unit + stride * bin)
    return total


def _root(value: Fraction) -> float:
    """The square root, from 64 bits or more: a variance may be far outside the range of floats."""
    if value <= 0:
        return 0.0
    shift = 128 - (value.numerator.bit_length() - value.denominator.bit_length()) // 2 * 2
    scaled = int(value * Fraction(2) ** shift)
    return math.ldexp(float(math.isqrt(scaled)), -shift // 2)
