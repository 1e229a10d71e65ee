# SPDX-License-Identifier: Apache-2.0
"""What a feature of a tf.train.Example can hold, and which columns that makes.

A feature is a list of bytes, of float32 or of int64, or nothing at all. A column is of a type that
one of these can be cast to, or of lists of it.
"""

from typing import TypeAlias

import pyarrow as pa

from manyhands.values.errors import DataError

FeatureType: TypeAlias = pa.DataType
"""What a column should be: int64, float32 or binary (or what these can be cast to), one value per
record, a fixed number of them (`pa.list_(t, n)`) or any number (`pa.list_(t)`)."""

NONE, BYTES, FLOATS, INTS = 0, 1, 2, 3
TYPES = {BYTES: pa.binary(), FLOATS: pa.float32(), INTS: pa.int64()}

MOST_BYTES = 2**31 - 1
"""At once; Arrow's lists count in 32 bits."""


def inner_type(shape: FeatureType) -> FeatureType:
    return shape.value_type if is_list(shape) else shape


def is_list(kind: FeatureType) -> bool:
    t = pa.types
    return t.is_list(kind) or t.is_large_list(kind) or t.is_fixed_size_list(kind)


def kind_of(name: str, base: FeatureType) -> int:
    """Which kind of feature holds values of this type."""
    t = pa.types
    if t.is_integer(base) or t.is_boolean(base) or t.is_timestamp(base):
        return INTS
    if t.is_floating(base):
        return FLOATS
    of_bytes = (t.is_binary, t.is_string, t.is_large_binary, t.is_large_string)
    if t.is_fixed_size_binary(base) or any(holds(base) for holds in of_bytes):
        return BYTES
    raise DataError(
        f"column '{name}' is {base}, which a tf.train.Example cannot hold: only integers, floats, "
        "bytes, text and lists of them."
    )
