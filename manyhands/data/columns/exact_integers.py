# SPDX-License-Identifier: Apache-2.0
"""Whole numbers that no number type of ours holds: told, so that they are kept as text.

An id that is rounded is another id. int64 holds 19 digits; a float64, which a column with fractions
is, every whole number up to 2^53 and only some beyond.
"""

import numpy as np
import pyarrow as pa

from manyhands.data.columns.arrays import compute, inner, is_list, numbers

FLOAT_WHOLE = 1 << 53
"""Whole numbers up to here are float64s."""
_MOST_DIGITS = 400
"""What has more is beyond all floats, and slow to read."""


def fits_int64(value: int) -> bool:
    return -(1 << 63) <= value < 1 << 63


def fits_float64(value: int) -> bool:
    """Whether a float64 is this very number."""
    try:
        return int(float(value)) == value
    except OverflowError:
        return False


def is_rounded(digits: str) -> bool:
    """Whether a whole number, as it is written, is not what a float64 of it would be."""
    return len(digits) > _MOST_DIGITS or not fits_float64(int(digits))


def is_wide(values: pa.Array | pa.ChunkedArray) -> bool:
    """Whether some of these whole numbers (or of those in lists) would be rounded as float64."""
    parts = values.chunks if isinstance(values, pa.ChunkedArray) else [values]
    return any(_is_wide(part) for part in parts)


def _is_wide(values: pa.Array) -> bool:
    if is_list(values.type):
        values = inner(values.drop_null())[0]
    if values.type != pa.int64() or not len(values):
        return False
    ends = compute.min_max(values).as_py()
    if ends["min"] is None or (ends["min"] >= -FLOAT_WHOLE and ends["max"] <= FLOAT_WHOLE):
        return False
    found = numbers(values)
    large = found[(found > FLOAT_WHOLE) | (found < -FLOAT_WHOLE)]
    return any(not fits_float64(value) for value in large.tolist())


def may_be_rounded(values: pa.Array) -> bool:
    """Whether floats (or those in lists) are so large that whole numbers may have been rounded to
    them."""
    if is_list(values.type):
        values = inner(values.drop_null())[0]
    if not pa.types.is_floating(values.type) or not len(values):
        return False
    with np.errstate(invalid="ignore"):
        return bool((np.abs(numbers(values)) >= FLOAT_WHOLE).any())
