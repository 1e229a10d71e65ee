# SPDX-License-Identifier: Apache-2.0
"""Against imbalance: weights for classes, and records taken less or more often than once.

What becomes of a record depends on its hash, its label and the counts alone.
"""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from manyhands.data.columns.hashing import Hashes, fraction, mix64

ClassCounts = Sequence[int] | NDArray[np.integer[Any]]


def class_weights(counts: ClassCounts) -> NDArray[np.float32]:
    """A weight per class, all records' weights summing to their number: n / (k * count)."""
    held = np.asarray(counts, np.float64)
    seen = held > 0
    return np.where(seen, held.sum() / (seen.sum() * np.where(seen, held, 1.0)), 0.0).astype(
        np.float32
    )


def resample(
    hashes: Hashes,
    labels: NDArray[np.integer[Any]],
    counts: ClassCounts,
    how: Literal["under", "over"],
) -> NDArray[np.int64]:
    """How often each record is taken, so that all classes have about as many records as the
    smallest (under) or the largest (over). Labels that are no class: once."""
    held = np.asarray(counts, np.float64)
    seen = held[held > 0]
    if not len(seen):
        return np.ones(len(hashes), np.int64)
    goal = seen.min() if how == "under" else seen.max()
    often = goal / np.where(held > 0, held, goal)
    known = (labels >= 0) & (labels < len(held))
    rate = np.where(known, often[np.where(known, labels, 0)], 1.0)
    whole = np.floor(rate)
    extra = fraction(mix64("resample", hashes)) < rate - whole
    return whole.astype(np.int64) + extra


def sample(hashes: Hashes, share: float) -> NDArray[np.bool_]:
    """Which records are taken, about this share of them; a smaller share takes a part of those."""
    return fraction(mix64("sample", hashes)) < share
