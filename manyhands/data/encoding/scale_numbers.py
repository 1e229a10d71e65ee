# SPDX-License-Identifier: Apache-2.0
"""Columns of numbers, and of lists of numbers, scaled or as they are.

A number that is missing, NaN or infinite is taken for the encoder's `fill`; one that is too large
for the encoded type becomes the nearest that is not. What comes out has no nulls.
"""

from collections.abc import Callable

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from manyhands.data.columns.array_types import AnyArray, Flags
from manyhands.data.columns.arrays import inner, is_list, is_number, nulls, numbers
from manyhands.data.columns.schema import type_of
from manyhands.data.encoding.column_facts import log_of
from manyhands.data.encoding.fitted_encoders import Ranked, Raw, ScaledNumbers, Stacked

_OPEN = 1e-6
"""How far from 0 and 1 ranks stay."""
_FLOAT32 = float(np.finfo(np.float32).max)


def scaled(fit: ScaledNumbers | Ranked, values: pa.Array) -> tuple[pa.Array, Flags]:
    """float32, or lists of it; and which rows are missing."""

    def change(x: AnyArray) -> AnyArray:
        x = x.astype(np.float64)
        return _ranks(fit, x) if isinstance(fit, Ranked) else _scaled(fit, x)

    return _changed(values, fit.fill, change, pa.float32())


def raw(fit: Raw, values: pa.Array) -> tuple[pa.Array, Flags]:
    """In the encoder's type; and which rows are missing."""
    to = type_of(fit.to)
    if pa.types.is_timestamp(values.type):
        values = values.cast(pa.int64())
    inside = to.value_type if is_list(to) else to
    if is_number(inside):
        return _changed(values, fit.fill, lambda x: x, inside)
    return _others(values, to), nulls(values)


def stacked(fit: Stacked, values: pa.Array) -> tuple[pa.Array, Flags]:
    """Every place of the lists as a column of its own; and in which rows one is missing."""
    width, rows = len(fit.members), len(values)
    flat, _ = inner(values)
    found = numbers(flat).reshape(rows, width)
    absent = nulls(flat).reshape(rows, width) | nulls(values)[:, None]
    made, gone = np.empty((rows, width), np.float32), np.zeros(rows, np.bool_)
    for place, member in enumerate(fit.members.values()):
        column = pa.array(np.ascontiguousarray(found[:, place]), mask=absent[:, place])
        one, missing = raw(member, column) if isinstance(member, Raw) else scaled(member, column)
        made[:, place] = one.to_numpy(zero_copy_only=False)
        gone |= missing
    return pa.FixedSizeListArray.from_arrays(pa.array(made.reshape(-1)), width), gone


def _scaled(fit: ScaledNumbers, x: AnyArray) -> AnyArray:
    x = log_of(x) if fit.log else x
    with np.errstate(over="ignore"):  # beyond all floats is beyond float32, and cut off later
        return (x - fit.center) / fit.scale


def _ranks(fit: Ranked, x: AnyArray) -> AnyArray:
    """Where quantiles coincide, halfway between the first and the last of them."""
    # A quarter of everything: differences between the largest floats are no floats any more.
    x, edges = x * 0.25, np.array(fit.edges) * 0.25
    ranks = np.linspace(0.0, 1.0, len(edges))
    up = np.interp(x, edges, ranks)
    down = -np.interp(-x, -edges[::-1], -ranks[::-1])
    return np.clip((up + down) / 2, _OPEN, 1 - _OPEN)


def _changed(
    values: pa.Array, fill: str | float, change: Callable[[AnyArray], AnyArray], to: pa.DataType
) -> tuple[pa.Array, Flags]:
    """All numbers changed and narrowed; lists keep their cuts."""
    kind, gone = values.type, nulls(values)
    if not is_list(kind):
        found, gone = _known(values, gone, fill)
        return pa.array(_narrowed(change(found), to), to), gone
    if pa.types.is_list(kind) and values.null_count:
        values = values.fill_null([])
    flat, cuts = inner(values)
    fixed = pa.types.is_fixed_size_list(kind)
    absent = np.repeat(gone, kind.list_size) if fixed and gone.any() else np.zeros(1, np.bool_)
    found, _ = _known(flat, absent, fill)
    return _lists(pa.array(_narrowed(change(found), to), to), cuts, kind), gone


def _known(values: pa.Array, gone: Flags, fill: str | float) -> tuple[AnyArray, Flags]:
    """The numbers, with `fill` for those that are missing; and which those are."""
    found = numbers(values)
    gone = gone | nulls(values)
    if found.dtype.kind == "f":
        gone |= ~np.isfinite(found)
    if not gone.any():
        return found, gone
    if found.dtype.kind == "f" or not float(fill).is_integer():
        return np.where(gone, float(fill), found), gone
    # A mean near the greatest int64 is rounded to a float that is one more.
    bounds = np.iinfo(found.dtype)
    nearest = min(max(int(fill), bounds.min), bounds.max)
    return np.where(gone, found.dtype.type(nearest), found), gone


def _narrowed(found: AnyArray, to: pa.DataType) -> AnyArray:
    dtype = np.dtype(to.to_pandas_dtype())
    if found.dtype == dtype or pa.types.is_float64(to):
        return found.astype(dtype, copy=False)
    if pa.types.is_floating(to):
        return np.clip(found, -_FLOAT32, _FLOAT32).astype(dtype)
    if found.dtype.kind != "f":
        bounds = np.iinfo(dtype)
        return np.clip(found.astype(np.int64, copy=False), bounds.min, bounds.max).astype(dtype)
    # The greatest int64 is no float64: the next smaller float64 is what fits.
    least, most = float(np.iinfo(dtype).min), float(np.iinfo(dtype).max)
    most = float(np.nextafter(most, 0)) if dtype.itemsize == 8 else most
    return np.clip(np.rint(found), least, most).astype(dtype)


def _lists(flat: pa.Array, cuts: NDArray[np.int64], kind: pa.DataType) -> pa.Array:
    if pa.types.is_fixed_size_list(kind):
        return pa.FixedSizeListArray.from_arrays(flat, kind.list_size)
    return pa.ListArray.from_arrays(pa.array(cuts.astype(np.int32)), flat)


def _others(values: pa.Array, to: pa.DataType) -> pa.Array:
    """Text, bytes, truth values and lists of them."""
    if values.type != to:
        values = values.cast(to)
    if not values.null_count:
        return values
    if pa.types.is_list(to):
        return values.fill_null([])
    if pa.types.is_boolean(to):
        return values.fill_null(False)
    return values.fill_null(b"" if pa.types.is_binary(to) else "")
