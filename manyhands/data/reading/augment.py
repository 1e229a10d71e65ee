# SPDX-License-Identifier: Apache-2.0
"""Transforms that vary records: images, tokens and features. Exact: a record comes out the same in
any batch, on any worker and in a replay, because its random numbers are its own (`Draw`) and every
operation is on single elements.

A transform is a function of (batch, draw) that returns a batch. Those here are values: they can be
compared, printed and sent to workers. Random ones leave held-out records alone; `Normalise` does
not. Images are (records, height, width) or (records, height, width, channels), bytes or floats.

    mh.prepared("data/photos", transform=Compose(RandomCrop("image", 4), RandomFlip("image"),
                                                 Normalise("image", 0.5, 0.25)))
"""

from dataclasses import dataclass

import numpy as np

from manyhands.data.columns.array_types import AnyArray
from manyhands.data.ordering.record_randomness import ColumnBatch, Draw, Transform
from manyhands.data.reading.augment_images import (
    Brightness,
    Contrast,
    Normalise,
    RandomCrop,
    RandomErase,
    RandomFlip,
    Rotate,
)
from manyhands.data.reading.random_transform import PerChannel, RandomTransform, array_of
from manyhands.values.errors import DataError

__all__ = [
    "Brightness",
    "Compose",
    "Contrast",
    "Draw",
    "FeatureDropout",
    "FeatureNoise",
    "Normalise",
    "RandomCrop",
    "RandomErase",
    "RandomFlip",
    "Rotate",
    "TokenDrop",
    "TokenMask",
    "TokenSwap",
    "Transform",
]


class Compose:
    """One after the other. Each draws numbers of its own, also when two are the same."""

    def __init__(self, *transforms: Transform) -> None:
        self.transforms = transforms

    def __call__(self, batch: ColumnBatch, draw: Draw) -> ColumnBatch:
        for i, transform in enumerate(self.transforms):
            batch = transform(batch, draw.within(i))
        return batch

    def __repr__(self) -> str:
        return f"Compose{self.transforms!r}"


# ---- tokens


@dataclass(frozen=True)
class TokenDrop(RandomTransform):
    """Each token is left out with probability p; the first stays where none would."""

    p: float = 0.1

    def varied(self, batch: ColumnBatch, draw: Draw) -> dict[str, AnyArray]:
        tokens, inside = _tokens(batch, self.column)
        keep = inside & (draw.uniform("drop", tokens.shape[1:]).numpy() >= self.p)
        keep[:, :1] |= inside[:, :1] & ~keep.any(axis=1, keepdims=True)
        together = np.argsort(~keep, axis=1, kind="stable")
        tokens = np.take_along_axis(np.where(keep, tokens, 0), together, axis=1)
        return {self.column: tokens, f"{self.column}_length": keep.sum(axis=1, dtype=np.int64)}


@dataclass(frozen=True)
class TokenMask(RandomTransform):
    """Each token becomes `mask` with probability p."""

    mask: int
    p: float = 0.15

    def varied(self, batch: ColumnBatch, draw: Draw) -> dict[str, AnyArray]:
        tokens, inside = _tokens(batch, self.column)
        masked = inside & (draw.uniform("mask", tokens.shape[1:]).numpy() < self.p)
        return {self.column: np.where(masked, self.mask, tokens)}


@dataclass(frozen=True)
class TokenSwap(RandomTransform):
    """Neighbours change places with probability p; each token at most once."""

    p: float = 0.1

    def varied(self, batch: ColumnBatch, draw: Draw) -> dict[str, AnyArray]:
        tokens, inside = _tokens(batch, self.column)
        place = np.arange(tokens.shape[1])
        odd = draw.below("odd", 2).numpy()[:, None]
        swapped = draw.uniform("swap", tokens.shape[1:]).numpy() < self.p
        swapped &= (place % 2 == odd) & np.pad(inside[:, 1:], ((0, 0), (0, 1)))
        source = place + swapped
        source[:, 1:] -= swapped[:, :-1]
        return {self.column: np.take_along_axis(tokens, source, axis=1)}


# ---- features


@dataclass(frozen=True)
class FeatureNoise(RandomTransform):
    """Normal noise of this deviation is added."""

    deviation: PerChannel = 0.1

    def varied(self, batch: ColumnBatch, draw: Draw) -> dict[str, AnyArray]:
        features = array_of(batch, self.column)
        noise = draw.normal("noise", features.shape[1:]).numpy()
        noise *= np.asarray(self.deviation, np.float32)
        return {self.column: features.astype(np.float32) + noise}


@dataclass(frozen=True)
class FeatureDropout(RandomTransform):
    """Each feature becomes `fill` (the columns' means, say) with probability p."""

    p: float = 0.1
    fill: PerChannel = 0.0

    def varied(self, batch: ColumnBatch, draw: Draw) -> dict[str, AnyArray]:
        features = array_of(batch, self.column)
        gone = draw.chance("dropout", self.p, features.shape[1:]).numpy()
        fill = np.asarray(self.fill, features.dtype)
        return {self.column: np.where(gone, fill, features)}


def _tokens(batch: ColumnBatch, column: str) -> tuple[AnyArray, AnyArray]:
    """Tokens, and which of them are inside their row."""
    tokens = array_of(batch, column)
    if tokens.ndim != 2 or f"{column}_length" not in batch:
        raise DataError(f"'{column}' is not a column of tokens, filled up (pad=\"longest\").")
    lengths = array_of(batch, f"{column}_length")
    return tokens, np.arange(tokens.shape[1]) < lengths[:, None]
