# SPDX-License-Identifier: Apache-2.0
"""Transforms of images: (records, height, width) or (records, height, width, channels), bytes or
floats. Import them from `augment`.

Invariant: every operation is on single pixels, or on one image by itself, so that an image comes
out the same whatever other images are in the batch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from manyhands.data.columns.array_types import AnyArray
from manyhands.data.ordering.record_randomness import ColumnBatch, Draw
from manyhands.data.reading.random_transform import (
    PerChannel,
    RandomTransform,
    array_of,
    with_columns,
)
from manyhands.values.errors import DataError

ROTATED_AT_ONCE = 1 << 18
"""Pixels; more would only leave the cache."""


@dataclass(frozen=True)
class RandomFlip(RandomTransform):
    """Mirrored with probability p: left and right, or (`vertical`) top and bottom."""

    p: float = 0.5
    vertical: bool = False

    def varied(self, batch: ColumnBatch, draw: Draw) -> dict[str, AnyArray]:
        images = _images(batch, self.column)
        mirrored = images[:, ::-1] if self.vertical else images[:, :, ::-1]
        flip = draw.chance("flip", self.p).numpy()
        return {self.column: np.where(_wide(flip, images), mirrored, images)}


@dataclass(frozen=True)
class RandomCrop(RandomTransform):
    """Moved by up to `padding` pixels each way; what comes in from outside is `fill`."""

    padding: int
    fill: float = 0

    def varied(self, batch: ColumnBatch, draw: Draw) -> dict[str, AnyArray]:
        images = _images(batch, self.column)
        records, height, width = images.shape[:3]
        moved = draw.below("move", 2 * self.padding + 1, (2,)).numpy() - self.padding
        rows = np.arange(height) + moved[:, :1]
        columns = np.arange(width) + moved[:, 1:]
        inside = _inside(rows, height)[:, :, None] & _inside(columns, width)[:, None, :]
        found = images[
            np.arange(records)[:, None, None],
            rows.clip(0, height - 1)[:, :, None],
            columns.clip(0, width - 1)[:, None, :],
        ]
        found[~inside] = self.fill
        return {self.column: found}


@dataclass(frozen=True)
class RandomErase(RandomTransform):
    """With probability p, a rectangle becomes `fill`; its sides are between `least` and `most` of
    the image's."""

    p: float = 0.5
    least: float = 0.1
    most: float = 0.4
    fill: float = 0

    def varied(self, batch: ColumnBatch, draw: Draw) -> dict[str, AnyArray]:
        images = _images(batch, self.column)
        u = draw.uniform("box", (4,)).numpy().astype(np.float64)
        inside = draw.chance("erase", self.p).numpy()[:, None, None]
        for axis, length in enumerate(images.shape[1:3]):
            side = np.rint((self.least + u[:, axis] * (self.most - self.least)) * length)
            start = np.floor(u[:, axis + 2] * (length - side + 1))
            place = np.arange(length)
            hit = (place >= start[:, None]) & (place < (start + side)[:, None])
            inside = inside & (hit[:, :, None] if axis == 0 else hit[:, None, :])
        found = images.copy()
        found[inside] = self.fill
        return {self.column: found}


@dataclass(frozen=True)
class Brightness(RandomTransform):
    """All pixels times a number between 1 - by and 1 + by."""

    by: float = 0.2

    def varied(self, batch: ColumnBatch, draw: Draw) -> dict[str, AnyArray]:
        images = _images(batch, self.column)
        factor = _factor(draw, self.by)
        return {self.column: _like(images * _wide(factor, images), images)}


@dataclass(frozen=True)
class Contrast(RandomTransform):
    """Distances from the image's mean times a number between 1 - by and 1 + by."""

    by: float = 0.2

    def varied(self, batch: ColumnBatch, draw: Draw) -> dict[str, AnyArray]:
        images = _images(batch, self.column)
        # One image at a time: numpy adds in another order where rows lie otherwise in memory.
        means = [float(image.sum(dtype=np.float64)) / image.size for image in images]
        mean = _wide(np.asarray(means, np.float32), images)
        factor = _wide(_factor(draw, self.by), images)
        return {self.column: _like((images - mean) * factor + mean, images)}


@dataclass(frozen=True)
class Rotate(RandomTransform):
    """Turned about the middle by up to `degrees` each way; what comes in from outside is `fill`."""

    degrees: float = 10.0
    fill: float = 0

    def varied(self, batch: ColumnBatch, draw: Draw) -> dict[str, AnyArray]:
        images = _images(batch, self.column)
        turns = (draw.uniform("angle").numpy().astype(np.float64) * 2 - 1) * self.degrees
        angles = [math.radians(turn) for turn in turns.tolist()]
        at_once = max(1, ROTATED_AT_ONCE // (images.shape[1] * images.shape[2]))
        parts = [
            _rotated(images[i : i + at_once], angles[i : i + at_once], self.fill)
            for i in range(0, len(images), at_once)
        ]
        return {self.column: np.concatenate(parts)}


@dataclass(frozen=True)
class Normalise:
    """(pixels - mean) / deviation as float32, for held-out records too. Bytes are first divided by
    255. `channels_first` gives (records, channels, height, width), as convolutions want it."""

    column: str
    mean: PerChannel = 0.0
    deviation: PerChannel = 1.0
    channels_first: bool = False

    def __call__(self, batch: ColumnBatch, draw: Draw) -> ColumnBatch:
        images = _images(batch, self.column)
        pixels = images.astype(np.float32)
        if images.dtype == np.uint8:
            pixels /= np.float32(255)
        pixels -= np.asarray(self.mean, np.float32)
        pixels /= np.asarray(self.deviation, np.float32)
        if self.channels_first:
            pixels = pixels[:, None] if pixels.ndim == 3 else np.moveaxis(pixels, 3, 1)
        return with_columns(batch, {self.column: pixels})


# ---- on arrays


def _images(batch: ColumnBatch, column: str) -> AnyArray:
    images = array_of(batch, column)
    if images.ndim not in (3, 4):
        raise DataError(
            f"'{column}' is of shape {images.shape[1:]}; an image is (height, width) or "
            "(height, width, channels)."
        )
    return images


def _wide(per_record: AnyArray, images: AnyArray) -> AnyArray:
    """(records,) → (records, 1, 1, ...)."""
    return per_record.reshape(-1, *[1] * (images.ndim - 1))


def _inside(places: AnyArray, length: int) -> AnyArray:
    return (places >= 0) & (places < length)


def _factor(draw: Draw, by: float) -> AnyArray:
    return 1 + (draw.uniform("factor").numpy() * 2 - 1) * np.float32(by)


def _like(pixels: AnyArray, images: AnyArray) -> AnyArray:
    """Rounded and cut where images are bytes."""
    if images.dtype == np.uint8:
        return np.rint(pixels).clip(0, 255).astype(np.uint8)
    return pixels.astype(images.dtype, copy=False)


def _rotated(images: AnyArray, angles: Sequence[float], fill: float) -> AnyArray:
    """Each pixel from the four that lie around its place before the turn."""
    records, height, width = images.shape[:3]
    cos = np.asarray([math.cos(a) for a in angles])[:, None, None]
    sin = np.asarray([math.sin(a) for a in angles])[:, None, None]
    y = (np.arange(height) - (height - 1) / 2)[:, None]
    x = (np.arange(width) - (width - 1) / 2)[None, :]
    from_y = y * cos + x * sin + (height - 1) / 2
    from_x = x * cos - y * sin + (width - 1) / 2
    top, left = np.floor(from_y), np.floor(from_x)
    down, right = from_y - top, from_x - left
    which = np.arange(records)[:, None, None]
    total = np.zeros(images.shape, np.float64)
    for dy, share_y in ((0, 1 - down), (1, down)):
        for dx, share_x in ((0, 1 - right), (1, right)):
            rows, columns = (top + dy).astype(np.int64), (left + dx).astype(np.int64)
            inside = _inside(rows, height) & _inside(columns, width)
            pixels = images[which, rows.clip(0, height - 1), columns.clip(0, width - 1)]
            pixels = np.where(_spread(inside, images), pixels, fill)
            total += pixels * _spread(share_y * share_x, images)
    return _like(total, images)


def _spread(per_pixel: AnyArray, images: AnyArray) -> AnyArray:
    return per_pixel[..., None] if images.ndim == 4 else per_pixel
