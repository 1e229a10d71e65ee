# SPDX-License-Identifier: Apache-2.0
"""Encoded images (PNG, JPEG, ...) as pixels. What cannot be decoded is said so, row by row.

Only formats that are plain data are opened: some others may run programs.
"""

import io
import warnings
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

FORMATS = ("PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF", "PPM")

ImageShape = tuple[int, int, int]
"""Height, width, channels (1, 3 or 4)."""

_MODES = {1: "L", 3: "RGB", 4: "RGBA"}


def shape_of(data: bytes) -> ImageShape | None:
    """From the head of an image alone; None when it cannot be read."""
    try:
        with _opened(data) as image:
            return image.height, image.width, _channels(image)
    except Exception:  # decoders raise all sorts of things on damaged data
        return None


def decode(data: bytes, shape: ImageShape) -> NDArray[np.uint8] | str:
    """Pixels of this shape, resized (bilinear, antialiased) where needed, or what is wrong."""
    height, width, channels = shape
    try:
        with _opened(data) as image, warnings.catch_warnings():
            warnings.simplefilter("error")
            pixels = _eight_bits(image).convert(_MODES[channels])
            if pixels.size != (width, height):
                pixels = pixels.resize((width, height), Image.Resampling.BILINEAR)
            return np.asarray(pixels, np.uint8).reshape(shape)
    except UnidentifiedImageError:
        return f"not an image of a known format ({', '.join(FORMATS)})"
    except Exception as error:  # decoders raise all sorts of things on damaged data
        return f"an image that cannot be decoded ({error or type(error).__name__})"


def decode_all(values: pa.Array, shape: ImageShape) -> tuple[pa.Array, dict[int, str]]:
    """uint8[H * W * C] for each value, and by row what is wrong. Missing and bad ones are black."""
    pixels = np.zeros((len(values), *shape), np.uint8)
    wrong: dict[int, str] = {}
    for row, data in enumerate(values):
        if data.is_valid:
            found = decode(data.as_py(), shape)
            if isinstance(found, str):
                wrong[row] = found
            else:
                pixels[row] = found
    flat: Any = pa.array(pixels.reshape(-1))
    return pa.FixedSizeListArray.from_arrays(flat, int(np.prod(shape))), wrong


def _opened(data: bytes) -> Image.Image:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return Image.open(io.BytesIO(data), formats=FORMATS)


def _channels(image: Image.Image) -> int:
    if "A" in image.getbands() or "transparency" in image.info:
        return 4
    return 1 if image.mode in ("1", "L", "F") or image.mode.startswith("I") else 3


def _eight_bits(image: Image.Image) -> Image.Image:
    """Pillow cuts values above 255 off when it converts 16-bit images."""
    if not image.mode.startswith("I"):
        return image
    wide = np.asarray(image).astype(np.int64)
    return Image.fromarray(np.clip(wide >> 8, 0, 255).astype(np.uint8))
