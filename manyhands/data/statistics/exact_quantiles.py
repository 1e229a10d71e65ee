# SPDX-License-Identifier: Apache-2.0
"""Exact quantiles of any number of values in little memory, found in a few rounds over them.

Every round looks at all values and says less and less roughly between which two the quantile lies:
first the least and the most of all, then a histogram of BINS between them, then one of the bin
that it fell in, and so on; once at most KEPT values are left between the bounds, these themselves.
Spread-out times need three rounds, whatever their number; the worst case is six.

    quantile = Quantile((0.8, 0.9))
    while not quantile.done:
        parts = [quantile.partial(values) for values in pieces]    # anywhere, in any order
        quantile = quantile.narrow(quantile.merge(parts))          # merging may be a tree
    quantile.found

Invariant: the result does not depend on how the values are cut in pieces.
"""

from collections.abc import Iterable

import msgspec
import numpy as np
from numpy.typing import NDArray

from manyhands.values.errors import DataError

Ints = NDArray[np.int64]

BINS = 1 << 16
KEPT = 1 << 16


class QuantileBounds(msgspec.Struct, frozen=True):
    """Where one quantile lies."""

    low: int
    high: int
    """Both may be it."""
    below: int
    """Values that are smaller than `low`."""
    inside: int

    @property
    def step(self) -> int:
        """The width of a bin; 0 when the values themselves are wanted."""
        return 0 if self.inside <= KEPT else -(-(self.high - self.low + 1) // BINS)


class Quantile(msgspec.Struct, frozen=True):
    fractions: tuple[float, ...]
    total: int = 0
    spans: tuple[QuantileBounds, ...] = ()
    """One per fraction; none before the first round."""

    @property
    def done(self) -> bool:
        return bool(self.spans) and all(s.low == s.high for s in self.spans)

    @property
    def found(self) -> tuple[int, ...]:
        """For each fraction the value that about so many values are smaller than."""
        assert self.done
        return tuple(s.low for s in self.spans)

    def partial(self, values: Ints) -> bytes:
        """What this round wants to know of some values: small, whatever their number."""
        if not self.spans:
            bounds = [len(values), values.min(), values.max()] if len(values) else [0, 0, 0]
            return np.array(bounds, np.int64).tobytes()
        return _packed([_asked(span, values) for span in self.spans])

    def merge(self, parts: Iterable[bytes]) -> bytes:
        """Some answers to this round as one."""
        if not self.spans:
            some = [p for p in map(_ints, parts) if p[0]] or [np.zeros(3, np.int64)]
            counts, least, most = np.stack(some).T
            return np.array([counts.sum(), least.min(), most.max()], np.int64).tobytes()
        merged: list[Ints] = []
        for part in parts:
            told = list(_unpacked(part))
            merged = list(map(_joined, self.spans, merged, told)) if merged else told
        return _packed(merged)

    def narrow(self, merged: bytes) -> "Quantile":
        """The next round, from what all values together answered to this one."""
        if not self.spans:
            total, least, most = _ints(merged).tolist()
            if not total:
                raise DataError("no record has a time, so there is no moment to split at.")
            span = QuantileBounds(least, most, 0, total)
            return Quantile(self.fractions, total, (span,) * len(self.fractions))
        spans: list[QuantileBounds] = []
        for cut, span, told in zip(self.fractions, self.spans, _unpacked(merged), strict=True):
            rank = min(self.total - 1, int(cut * self.total + 0.5))
            spans.append(_narrowed(span, told, rank - span.below))
        return Quantile(self.fractions, self.total, tuple(spans))


def _asked(span: QuantileBounds, values: Ints) -> Ints:
    """A histogram of the values in the span, or these values themselves."""
    if span.low == span.high:
        return np.empty(0, np.int64)
    inside = values[(values >= span.low) & (values <= span.high)]
    if not span.step:
        return inside
    offsets = inside.view(np.uint64) - np.int64(span.low).view(np.uint64)
    bins = (offsets // np.uint64(span.step)).astype(np.int64)
    return np.bincount(bins, minlength=BINS).astype(np.int64)


def _joined(span: QuantileBounds, left: Ints, right: Ints) -> Ints:
    return left + right if span.step and span.low < span.high else np.concatenate([left, right])


def _narrowed(span: QuantileBounds, told: Ints, rank: int) -> QuantileBounds:
    """`rank`: how many of the values inside are before the quantile."""
    if span.low == span.high:
        return span
    if not span.step:
        value = int(np.sort(told)[rank])
        return QuantileBounds(value, value, span.below + int((told < value).sum()), 1)
    before = np.cumsum(told)
    place = int(np.searchsorted(before, rank, side="right"))
    low = span.low + place * span.step
    high = min(span.high, low + span.step - 1)
    inside = int(told[place])
    return QuantileBounds(low, high, span.below + int(before[place]) - inside, inside)


def _ints(data: bytes) -> Ints:
    return np.frombuffer(data, np.int64)


def _packed(arrays: list[Ints]) -> bytes:
    return b"".join(np.int64(len(a)).tobytes() + a.tobytes() for a in arrays)


def _unpacked(data: bytes) -> Iterable[Ints]:
    numbers, start = _ints(data), 0
    while start < len(numbers):
        stop = start + 1 + int(numbers[start])
        yield numbers[start + 1 : stop]
        start = stop


def ordered(values: NDArray[np.float64]) -> Ints:
    """Floats as integers in the same order (-0.0 as 0.0)."""
    bits = (values + 0.0).view(np.int64)
    return bits ^ ((bits >> 63) & np.int64((1 << 63) - 1))


def disordered(keys: Ints) -> NDArray[np.float64]:
    """The floats again."""
    return (keys ^ ((keys >> 63) & np.int64((1 << 63) - 1))).view(np.float64)
