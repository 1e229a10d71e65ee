# SPDX-License-Identifier: Apache-2.0
# pyright: reportAttributeAccessIssue=false
# (the functions of pyarrow.compute are made when it is imported)
"""Tables of any Arrow types as pieces of ours; values that do not fit make their record bad.

Structs become columns `a.b`, dictionaries their values, dates and times UTC microseconds; decimals
and unsigned numbers int64 or float64 where these hold all of them exactly, and text where not; what
has no place among our types (maps, lists of structs) becomes JSON text. A column whose type is
given is converted to it. Invariant: rows in = rows of the piece + bad records.
"""

import json
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from manyhands.data.columns.schema import plain
from manyhands.data.sources.cutting.source import Bad, TablePiece, Types, form_asked
from manyhands.data.sources.values.date_order import is_undecided
from manyhands.data.sources.values.dates_in_text import all_times, number_times
from manyhands.data.sources.values.text_values import without_words
from manyhands.values.errors import DataError

TEXT_LENGTH = 60
"""How much of a bad value is shown."""


def piece_of(
    table: pa.Table,
    numbers: NDArray[np.int64],
    *,
    file: str,
    types: Types,
    places: NDArray[np.int64] | None = None,
    bad: Sequence[Bad] = (),
    missing: Sequence[str] = (),
) -> TablePiece:
    """The table with our types. `places` has the byte of each row; `bad` was found before; text
    that is one of `missing` is null."""
    flat = flattened(table, file)
    columns: dict[str, pa.Array] = {}
    wrong: dict[int, Bad] = {}
    for name in flat.column_names:
        column = without_words(_settled(flat[name]), missing)
        kind = types.get(name, exact_kind(column))
        form = form_asked(types, name)
        if is_undecided(column, kind, form):
            kind = plain(column.type)
        try:
            columns[name], failed = convert(column, kind, form)
        except pa.ArrowNotImplementedError:
            raise DataError(
                f"{file}: column '{name}' is {column.type} and cannot be made {kind}."
            ) from None
        for row in failed:
            what = f"column '{name}' is no {kind}" if name in types else f"column '{name}' is bad"
            what += f" ({form})" if form else ""
            byte = -1 if places is None else int(places[row])
            text = printable(column, row)
            wrong.setdefault(row, Bad(file, int(numbers[row]), byte, what, text))
    made = pa.table(columns)
    if wrong:
        keep = np.ones(len(numbers), dtype=bool)
        keep[list(wrong)] = False
        made, numbers = made.filter(pa.array(keep)), numbers[keep]
    found = sorted([*bad, *wrong.values()], key=lambda b: b.record)
    return TablePiece(made, numbers, found)


def flattened(table: pa.Table, file: str) -> pa.Table:
    """Structs as columns `a.b`, however deep."""
    try:
        while any(pa.types.is_struct(kind) for kind in table.schema.types):
            table = table.flatten()
        names = table.column_names
    except UnicodeDecodeError:
        raise DataError(f"{file} has a column whose name is no text: it is damaged.") from None
    if not names:
        raise DataError(f"{file} has no columns.")
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DataError(f"{file} has more than one column '{twice[0]}'. Rename one of them.")
    return table


def ours(kind: pa.DataType) -> pa.DataType:
    """The type of ours that a column of this type becomes."""
    if _is_list(kind):
        inner = ours(kind.value_type)
        if pa.types.is_string(inner) and pa.types.is_nested(kind.value_type):
            return pa.string()
        return plain(kind)
    return plain(kind)


def exact_kind(column: pa.Array) -> pa.DataType:
    """The type of ours that holds these very values; text, where no number type does."""
    kind = column.type
    if pa.types.is_decimal(kind):
        return next((k for k in (pa.int64(), pa.float64()) if _is_exact(column, k)), pa.string())
    if pa.types.is_uint64(kind) and not _is_exact(column, pa.int64()):
        return pa.string()
    if _is_list(kind) and kind.value_type in (pa.uint64(),):
        inside = exact_kind(column.flatten())
        return pa.string() if pa.types.is_string(inside) else ours(kind)
    return ours(kind)


def _is_exact(column: pa.Array, kind: pa.DataType) -> bool:
    if pa.types.is_decimal(column.type) and pa.types.is_integer(kind) and column.type.scale > 0:
        return False
    try:
        made = column.cast(kind)
        if pa.types.is_integer(kind):
            return True
        back = made.cast(column.type, safe=False)
    except pa.ArrowInvalid:
        return False
    return back.equals(column)


def convert(column: pa.Array, kind: pa.DataType, form: str = "") -> tuple[pa.Array, list[int]]:
    """The column as `kind`, and the rows that cannot be it (null in the result). `form`: of times
    in text."""
    try:
        made = cast(column, kind, form)
        made.validate(full=True)
        return made, []
    except pa.ArrowNotImplementedError:
        raise
    except (pa.ArrowInvalid, UnicodeDecodeError):
        if len(column) == 1:
            return pa.nulls(1, kind), [0]
    middle = len(column) // 2
    left, bad_left = convert(column[:middle], kind, form)
    right, bad_right = convert(column[middle:], kind, form)
    return pa.concat_arrays([left, right]), [*bad_left, *(middle + row for row in bad_right)]


def cast(column: pa.Array, kind: pa.DataType, form: str = "") -> pa.Array:
    """The column as `kind`; ArrowInvalid when a value does not fit."""
    source = column.type
    if source == kind:
        return column
    if pa.types.is_string(kind) and pa.types.is_nested(source):
        texts = [None if v is None else _json(v) for v in column.to_pylist()]
        return pa.array(texts, pa.string())
    if _is_list(kind) and not _is_list(source):
        return _wrapped(cast(column, kind.value_type, form)).cast(kind)
    if _is_list(source) and not _is_list(kind):
        return cast(_unwrapped(column), kind, form)
    if pa.types.is_string(source) or pa.types.is_large_string(source):
        return _parse(column, kind, form)
    if pa.types.is_timestamp(kind) and pa.types.is_timestamp(source):
        return column.cast(kind, safe=source.unit != "ns")  # what is finer than ours is cut off
    if pa.types.is_timestamp(kind) and (_is_float(source) or pa.types.is_integer(source)):
        return _all(number_times(column, form), column)
    return pc.cast(column, options=pc.CastOptions(kind, allow_float_truncate=_is_float(kind)))


def _parse(texts: pa.Array, kind: pa.DataType, form: str) -> pa.Array:
    """Text as something else: blanks around it do not matter, and nothing but blanks is null."""
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        return texts.cast(kind)
    texts = pc.utf8_trim_whitespace(texts)
    texts = pc.if_else(pc.equal(texts, ""), pa.scalar(None, texts.type), texts)
    if pa.types.is_timestamp(kind):
        return _all(all_times(texts, form), texts)
    return texts.cast(kind)


def _wrapped(column: pa.Array) -> pa.Array:
    """Every value as a list of one."""
    there = column.is_valid().to_numpy(zero_copy_only=False)
    offsets = np.concatenate(([0], np.cumsum(there))).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), column.drop_null(), mask=pa.array(~there))


def _unwrapped(column: pa.Array) -> pa.Array:
    """The values of lists of one."""
    there = column.is_valid().to_numpy(zero_copy_only=False)
    if not pc.all(pc.equal(pc.list_value_length(column), 1)).as_py():
        raise pa.ArrowInvalid("not one value")
    places = np.cumsum(there) - 1
    return column.flatten().take(pa.array(places, mask=~there))


def _all(made: pa.Array, source: pa.Array) -> pa.Array:
    if made.null_count > source.null_count:
        raise pa.ArrowInvalid("not a time")
    return made


def _settled(column: pa.ChunkedArray) -> pa.Array:
    """One array, in the plainest layout that has the same values."""
    array = column.combine_chunks()
    assert isinstance(array, pa.Array)
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if isinstance(array, pa.DictionaryArray):
        array = array.dictionary_decode()
    if isinstance(array, pa.RunEndEncodedArray):
        array = pc.run_end_decode(array)
    if isinstance(array, pa.ListViewArray | pa.LargeListViewArray):
        array = pa.array(array.to_pylist(), pa.list_(array.type.value_type))
    return array


def printable(column: pa.Array, row: int) -> str:
    """The value of a row as one short line."""
    try:
        value = column[row].as_py()
    except (ValueError, OverflowError, UnicodeDecodeError):
        value = column[row : row + 1].cast(pa.binary())[0].as_py()
    text = value if isinstance(value, str) else repr(value)
    text = text.encode("unicode_escape").decode("ascii")
    return text if len(text) <= TEXT_LENGTH else f"{text[:TEXT_LENGTH]}..."


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _is_list(kind: pa.DataType) -> bool:
    t = pa.types
    return t.is_list(kind) or t.is_large_list(kind) or t.is_fixed_size_list(kind)


def _is_float(kind: pa.DataType) -> bool:
    """Whether rounding is what one expects of it."""
    return pa.types.is_floating(kind.value_type if _is_list(kind) else kind)
