# SPDX-License-Identifier: Apache-2.0
"""Python objects as rows, and rows as Arrow tables.

Values of different types in one column get the type that holds them all (`schema.unify`), as they
would if they stood in different batches. What Arrow cannot hold makes its row bad.
"""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from manyhands.data.columns.exact_integers import fits_float64, fits_int64
from manyhands.data.columns.schema import unify
from manyhands.data.sources.values import arrow_casting

PythonRow = dict[str, Any]

_REFUSALS = (pa.ArrowException, TypeError, ValueError, OverflowError)
"""What Arrow raises for values that it cannot hold."""


def as_row(record: object, names: Sequence[str] | None, columns: Sequence[str]) -> PythonRow:
    """The record by column, in the order of `columns` where they are known; else ValueError."""
    row = _named(record, names)
    for name in row:
        if not isinstance(name, str):
            raise ValueError(f"has the key {name!r}, which is no text")
    columns = columns or list(row)
    if not columns:
        raise ValueError("is empty")
    missing = [name for name in columns if name not in row]
    extra = [name for name in row if name not in columns]
    if missing or extra:
        lack = f"has no {', '.join(missing)}" if missing else ""
        more = f"has {', '.join(extra)}, which the first record has not" if extra else ""
        raise ValueError(" and ".join(filter(None, (lack, more))))
    return {name: _value(row[name]) for name in columns}


def described(record: object) -> str:
    """A bad record in a few words; what it holds may be anything."""
    return f"a {type(record).__name__}"


def size_of_row(row: PythonRow) -> int:
    """Roughly how many bytes its values are."""
    return sum(_size(value) for value in row.values())


def table_of(rows: Sequence[PythonRow], columns: Sequence[str]) -> tuple[pa.Table, dict[int, str]]:
    """The rows as a table, without those that are bad: which they are and why."""
    arrays: list[pa.Array] = []
    wrong: dict[int, str] = {}
    for name in columns:
        array, failed = _column([row[name] for row in rows])
        arrays.append(array)
        for row in failed:
            kind = type(rows[row][name]).__name__
            wrong.setdefault(row, f"column '{name}' is a {kind}, which has no place in a table")
    table = pa.Table.from_arrays(arrays, list(columns))
    if wrong:
        table = table.take(pa.array(np.delete(np.arange(len(rows)), list(wrong))))
    return table, dict(sorted(wrong.items()))


def _named(record: object, names: Sequence[str] | None) -> Mapping[Any, Any]:
    if isinstance(record, Mapping):
        return cast(Mapping[Any, Any], record)
    if isinstance(record, np.ndarray) or _is_tensor(record):
        return {"x": record}
    if isinstance(record, str):
        return {"text": record}
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        return {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}
    if isinstance(record, tuple | list):
        values = cast(Sequence[Any], record)
        fields = getattr(record, "_fields", names)  # a named tuple has its own
        if fields is None:
            raise ValueError(f"is a {type(record).__name__} of {len(values)}; give names for them")
        if len(fields) != len(values):
            raise ValueError(f"has {len(values)} values for {len(fields)} names")
        return dict(zip(fields, values, strict=True))
    raise ValueError(
        f"is a {type(record).__name__}; give dicts, named tuples, arrays, tensors or text"
    )


def _is_tensor(value: object) -> bool:
    """Without importing torch, which takes seconds: who has a tensor has imported it."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _value(value: object) -> Any:
    """Arrays stay arrays; whatever holds one number becomes that number."""
    if _is_tensor(value):
        whole = cast(Any, value).detach().to("cpu")
        value = (whole.float() if str(whole.dtype) == "torch.bfloat16" else whole).numpy()
    if not isinstance(value, np.ndarray):
        return value
    array = cast(NDArray[Any], value)
    if array.dtype == np.float16:
        array = array.astype(np.float32)
    return array if array.ndim else array[()]


def _size(value: Any) -> int:
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, str | bytes):
        return len(value) + 8
    return 16 * len(value) if isinstance(value, list | tuple | dict) else 16


def _column(values: list[Any]) -> tuple[pa.Array, list[int]]:
    """An array, null where a value is bad, and which those are."""
    try:
        return _array(values), []
    except _REFUSALS:
        pass
    whole = [value for value in values if isinstance(value, int)]
    if any(not fits_int64(value) for value in whole) or (
        any(isinstance(value, float) for value in values)
        and any(not fits_float64(value) for value in whole)
    ):  # rounded they would be others
        values = [str(v) if isinstance(v, int | float) else v for v in values]
    singles = [_single(value) for value in values]
    failed = [row for row, single in enumerate(singles) if single is None]
    kind = unify(arrow_casting.ours(single.type) for single in singles if single is not None)
    arrays = [pa.nulls(1, kind) if s is None else arrow_casting.cast(s, kind) for s in singles]
    return pa.concat_arrays(arrays), failed


def _single(value: Any) -> pa.Array | None:
    try:
        return _array([value])
    except _REFUSALS:
        return None


def _array(values: list[Any]) -> pa.Array:
    arrays = [value for value in values if isinstance(value, np.ndarray)]
    alike = {(a.shape, a.dtype.str) for a in arrays}
    missing = sum(value is None for value in values)
    if len(alike) == 1 and len(arrays) + missing == len(values) and arrays[0].size:
        return _fixed(values, arrays[0])
    return pa.array([v.ravel() if isinstance(v, np.ndarray) else v for v in values])


def _fixed(values: list[Any], like: NDArray[Any]) -> pa.Array:
    """Arrays of one shape, or None, as lists of one length."""
    filler = np.zeros_like(like)
    flat = np.stack([filler if value is None else value for value in values]).ravel()
    missing = pa.array([value is None for value in values])
    return pa.FixedSizeListArray.from_arrays(pa.array(flat), like.size, mask=missing)
