# SPDX-License-Identifier: Apache-2.0
"""Values as indices: the numbering that categories and tokens share.

0 is a value that training never saw, 1 a missing one, known values follow from 2, the most frequent
first.
"""

import base64
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from manyhands.data.columns.arrays import compute, nulls
from manyhands.data.encoding.requested_encoding import TOKENS, Encoding
from manyhands.data.statistics.value_counts import ValueCounts

UNKNOWN, MISSING, KNOWN = 0, 1, 2

KnownValue = str | int | float | bool


def most_common(counts: ValueCounts | None, encoding: Encoding) -> list[KnownValue]:
    """The most frequent ones, in that order."""
    if counts is None:
        return []
    enough = int((counts.counts >= encoding.seen).sum())
    most = encoding.most or len(counts)
    values = counts.values[: min(enough, most)]
    if encoding.kind in TOKENS and pa.types.is_integer(values.type):
        return [chr(point) for point in values.to_pylist()]
    return as_json(values)


def places_of(known: Sequence[KnownValue], values: pa.Array) -> pa.Array:
    """Where each value stands among the known ones; null for the others."""
    if not known or pa.types.is_null(values.type):
        return pa.nulls(len(values), pa.int64())
    value_set = as_arrow(known, values.type)
    return compute.index_in(values, value_set=value_set).cast(pa.int64())


def indices_of(known: Sequence[KnownValue], values: pa.Array) -> pa.Array:
    places = places_of(known, values).fill_null(UNKNOWN - KNOWN).to_numpy() + KNOWN
    return pa.array(np.where(nulls(values), MISSING, places))


# ---- known values, in a manifest and in memory


def as_json(values: pa.Array) -> list[KnownValue]:
    """Times as microseconds, bytes as base64."""
    if pa.types.is_timestamp(values.type):
        values = values.cast(pa.int64())
    if pa.types.is_binary(values.type):
        return [base64.b64encode(v).decode() for v in values.to_pylist()]
    return values.to_pylist()


def as_arrow(values: Sequence[KnownValue], kind: pa.DataType) -> pa.Array:
    """The values again."""
    if pa.types.is_timestamp(kind):
        return pa.array(values, pa.int64()).cast(kind)
    if pa.types.is_binary(kind):
        return pa.array([base64.b64decode(str(v)) for v in values], kind)
    return pa.array(values, kind)
