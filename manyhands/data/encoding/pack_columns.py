# SPDX-License-Identifier: Apache-2.0
"""Many columns of numbers as one: `--pack x=pixel*` makes 784 columns a column of 784 numbers.

Invariant: a pattern takes features alone. What records are told apart, weighed or judged by (label,
id, group, time, weight, the column of a split) never becomes an input because a pattern matches it.
"""

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from manyhands.data.columns.arrays import is_number, nulls, numbers, whole
from manyhands.data.columns.schema import Column, Schema, name_of, type_of, unify
from manyhands.values.errors import DataError

_BLOCK = 1 << 19
"""Numbers that are moved together: few enough for a cache, many enough to be worth a call."""


def matching(pattern: str, names: Sequence[str]) -> list[str]:
    """The names that match, in their order. A column may be called `x[0]`: a name is itself."""
    if pattern in names:
        return [pattern]
    return [n for n in names if fnmatch.fnmatchcase(n, pattern)]


def match(patterns: Iterable[str], names: Sequence[str]) -> list[str]:
    """The names that match some pattern; by pattern, and for each in their order."""
    found: dict[str, None] = {}
    for pattern in patterns:
        new = matching(pattern, names)
        if not new:
            raise DataError(f"no column matches '{pattern}'; there are {', '.join(names)}.")
        found |= dict.fromkeys(new)
    return list(found)


def groups_of(
    asked: Mapping[str, Sequence[str]], schema: Schema, apart: Iterable[str] = ()
) -> dict[str, list[str]]:
    """The columns of each group. `apart`: features that only their own name may pack."""
    free = [
        c.name for c in schema if c.role == "feature" and c.type != "null" and c.name not in apart
    ]
    columns = {c.name: c for c in schema}
    groups: dict[str, list[str]] = {}
    taken: dict[str, str] = {}
    for name, patterns in asked.items():
        members = dict[str, None]()
        for pattern in patterns:
            members |= dict.fromkeys([pattern] if pattern in columns else match([pattern], free))
        for member in members:
            _refuse_member(name, columns[member])
            if taken.setdefault(member, name) != name:
                raise DataError(f"column '{member}' is packed into '{taken[member]}' and '{name}'.")
        if name in columns and name not in members:
            raise DataError(f"--pack {name}: there is a column of that name already.")
        groups[name] = list(members)
    return groups


def _refuse_member(name: str, column: Column) -> None:
    if column.role not in ("feature", "text", "image"):
        raise DataError(
            f"--pack {name}: '{column.name}' is the {column.role}, which must not become an input. "
            "Leave it out there; a pattern like * does not take it."
        )
    kind = type_of(column.type)
    if not (is_number(kind) or pa.types.is_boolean(kind)):
        raise DataError(
            f"--pack {name}: '{column.name}' holds {column.type}; only numbers can be stacked. "
            f"Name the columns that do, or leave it out: --drop {column.name}"
        )


def pack(table: pa.Table, groups: Mapping[str, Sequence[str]]) -> pa.Table:
    """Each group's columns stacked into one of its name, where the first of them stood."""
    for name, members in groups.items():
        places = {n: i for i, n in enumerate(table.column_names)}
        stacked = _stacked(name, {m: whole(table.column(places[m])) for m in members})
        # Everything before the first member stays before it.
        first = min(places[m] for m in members)
        gone = {places[m] for m in members}
        table = table.select([i for i in places.values() if i not in gone])
        if name in table.column_names:
            raise DataError(f"--pack {name}: there is a column of that name already.")
        table = table.add_column(first, name, stacked)
    return table


def packed_schema(schema: Schema, groups: Mapping[str, Sequence[str]]) -> Schema:
    """Of what `pack` makes. The role is the first member's."""
    for name, members in groups.items():
        chosen = set(members)
        inside = [c for c in schema if c.name in chosen]
        kind = name_of(_kind(type_of(c.type) for c in inside))
        size = len(members)
        packed = Column(name, f"{kind}[{size}]", inside[0].role, (size,))
        first, gone = inside[0].name, chosen - {inside[0].name}
        schema = tuple(packed if c.name == first else c for c in schema if c.name not in gone)
    return schema


def _stacked(name: str, columns: Mapping[str, pa.Array]) -> pa.Array:
    """Missing numbers stay missing inside the lists."""
    for member, values in columns.items():
        if not (is_number(values.type) or pa.types.is_boolean(values.type)):
            raise DataError(
                f"--pack {name}: '{member}' holds {values.type}; only numbers can be stacked."
            )
    kind = _kind(values.type for values in columns.values())
    dtype = np.dtype(kind.to_pandas_dtype())
    flat = pa.array(_interleaved([numbers(v) for v in columns.values()], dtype).reshape(-1), kind)
    if any(v.null_count for v in columns.values()):
        gone = _interleaved([nulls(v) for v in columns.values()], np.dtype(bool)).reshape(-1)
        flat = pa.array(flat.to_numpy(zero_copy_only=False), kind, mask=gone)
    return pa.FixedSizeListArray.from_arrays(flat, len(columns))


def _kind(kinds: Iterable[pa.DataType]) -> pa.DataType:
    return unify(pa.uint8() if pa.types.is_boolean(k) else k for k in kinds)


def _interleaved(columns: Sequence[NDArray[Any]], dtype: np.dtype[Any]) -> NDArray[Any]:
    """One row for each record, some rows at a time."""
    length = len(columns[0])
    rows = max(64, _BLOCK // len(columns))
    stacked = np.empty((length, len(columns)), dtype)
    for start in range(0, length, rows):
        block = [column[start : start + rows] for column in columns]
        stacked[start : start + rows] = np.stack(block).T
    return stacked
