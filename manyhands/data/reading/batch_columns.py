# SPDX-License-Identifier: Apache-2.0
"""Which columns a batch of encoded records holds, and how each gets into it.

The same for records of shards and for records that were encoded a moment ago: what a batch looks
like depends on the schema and on how the task wants it, not on where its rows lie.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from manyhands.data.columns.array_types import AnyArray
from manyhands.data.columns.schema import ID, Column, Schema, column_of, type_of
from manyhands.data.reading.pad_and_collate import (
    Picks,
    take_fixed,
    take_flat,
    take_padded,
    take_strings,
)
from manyhands.data.reading.prepared_data import FEATURES, Pad, PreparedData
from manyhands.data.shards.shard_columns import Ragged
from manyhands.values.errors import DataError


def with_features_named(data: PreparedData, schema: Schema) -> PreparedData:
    """The same with the columns that a stack of "features" means: all numbers with a point (and
    yes or no) that are features, in their order. Whole numbers may be indices of categories."""
    if FEATURES not in (data.stack or {}).values():
        return data
    found = tuple(c.name for c in schema if c.role == "feature" and _is_numeric(c))
    if not found:
        raise DataError('stack: "features": there are no numeric features; name the columns.')
    stack = {name: found if of == FEATURES else of for name, of in (data.stack or {}).items()}
    return replace(data, stack=stack)


def stacked_names(schema: Schema, names: Sequence[str]) -> tuple[str, ...]:
    """What each column of a stack's matrix holds: age, when[0], when[1], ..."""
    found: list[str] = []
    for name in names:
        kind = type_of(column_of(schema, name).type)
        width = kind.list_size if pa.types.is_fixed_size_list(kind) else None
        found += [name] if width is None else [f"{name}[{place}]" for place in range(width)]
    return tuple(found)


def batch_columns(schema: Schema, data: PreparedData) -> list[tuple[str, str]]:
    """Names of what a batch holds, and their kinds: fixed, ragged or text."""
    pad = data.pad
    if not (pad > 0 if isinstance(pad, int) else pad in ("longest", "flat")):
        raise DataError(f"pad = {pad!r}: give a length, 'longest' or 'flat'.")
    stack = with_features_named(data, schema).stack or {}
    stacked = {name for names in stack.values() for name in names}
    for name in sorted(stacked):
        if _kind(column_of(schema, name)) != "fixed":
            raise DataError(f"stack: column '{name}' has rows of different lengths.")
    taken = [name for name in stack if name in {column.name for column in schema}]
    if taken:
        raise DataError(f"stack: '{taken[0]}' is a column already; choose another name.")
    names = data.columns
    if names is None:
        kinds = [(c.name, _kind(c)) for c in schema if c.name not in stacked]
        chosen = [(name, kind) for name, kind in kinds if kind != "text" and name != ID]
    else:
        chosen = [(name, _kind(column_of(schema, name))) for name in names if name != ID]
    return [(ID, "fixed"), *chosen, *((name, "fixed") for name in stack)]


def add_column(
    batch: dict[str, Any],
    name: str,
    kind: str,
    columns: list[Any],
    picks: Picks,
    size: int,
    pad: Pad,
) -> None:
    """The picked rows of a column, one array for each pick, as a batch of `size` holds them."""
    if kind == "fixed":
        batch[name] = torch.from_numpy(take_fixed(columns, picks, size))
    elif kind == "text":
        batch[name] = take_strings(columns, picks, size)
    elif pad == "flat":
        values, offsets = take_flat(columns, picks, size)
        batch[name] = torch.from_numpy(values)
        batch[f"{name}_offsets"] = torch.from_numpy(offsets)
    else:
        values, lengths = take_padded(columns, picks, size, None if pad == "longest" else pad)
        batch[name] = torch.from_numpy(values)
        batch[f"{name}_length"] = torch.from_numpy(lengths)


def with_stacks(
    columns: Mapping[str, AnyArray | Ragged], rows: int, stack: Mapping[str, Sequence[str]] | None
) -> dict[str, AnyArray | Ragged]:
    """The columns, and each stack of some of them as one matrix of float32."""
    stacked = {name: _side_by_side(columns, rows, of) for name, of in (stack or {}).items()}
    return {**columns, **stacked}


def _side_by_side(
    columns: Mapping[str, AnyArray | Ragged], rows: int, names: Sequence[str]
) -> AnyArray:
    parts: list[AnyArray] = []
    for name in names:
        column = columns[name]
        assert not isinstance(column, Ragged)
        width = int(np.prod(column.shape[1:]))  # also where there are no rows
        parts.append(column.reshape(rows, width).astype(np.float32))
    return np.concatenate(parts, axis=1)


def _is_numeric(column: Column) -> bool:
    if _kind(column) != "fixed":
        return False
    kind = type_of(column.type)
    kind = kind.value_type if pa.types.is_fixed_size_list(kind) else kind
    return pa.types.is_floating(kind) or pa.types.is_boolean(kind)


def _kind(column: Column) -> str:
    kind, t = type_of(column.type), pa.types
    if t.is_string(kind):
        return "text"
    return "ragged" if t.is_list(kind) or t.is_binary(kind) else "fixed"
