# SPDX-License-Identifier: Apache-2.0
"""Raw columns → numbers, with encoders that were fitted before. Serving does exactly the same.

What a row becomes depends on that row and on the encoders alone. No value raises: those that
training never saw have an index (`vocabulary`), and a row that cannot be encoded at all (no label,
a broken image, `missing=error`) is named by `attempt`.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from manyhands.data.columns.array_types import Flags
from manyhands.data.columns.arrays import is_list, is_text, nulls, whole
from manyhands.data.columns.hashing import hash_values
from manyhands.data.columns.schema import ID, Column, Schema, form_of, type_of
from manyhands.data.encoding.column_facts import plain_numbers
from manyhands.data.encoding.cyclical_dates import circles
from manyhands.data.encoding.decode_images import decode_all
from manyhands.data.encoding.fitted_encoders import (
    NO_CLASS,
    Classes,
    Dates,
    DroppedColumn,
    Fitted,
    Hashed,
    Picture,
    Ranked,
    Raw,
    ScaledNumbers,
    Stacked,
    Tokens,
    Vocabulary,
)
from manyhands.data.encoding.pack_columns import pack
from manyhands.data.encoding.scale_numbers import raw, scaled, stacked
from manyhands.data.encoding.tokenize_text import byte_tokens, chars, shortened, token_lists, words
from manyhands.data.encoding.vocabulary import KNOWN, MISSING, UNKNOWN, indices_of, places_of
from manyhands.data.sources.values.arrow_casting import convert
from manyhands.values.errors import DataError


@dataclass(slots=True)
class _Encoded:
    values: pa.Array
    missing: Flags
    wrong: dict[int, str] = field(default_factory=dict[int, str])
    """By row."""


def apply(fitted: Mapping[str, Fitted], table: pa.Table) -> pa.Table:
    """Every row encoded; DataError at the first that cannot be."""
    encoded, refused = attempt(fitted, table)
    for row, what in refused.items():
        raise DataError(f"record {row + 1:,} of {table.num_rows:,}: {what}")
    return encoded


def attempt(fitted: Mapping[str, Fitted], table: pa.Table) -> tuple[pa.Table, dict[int, str]]:
    """The rows that can be encoded, in their order; and the others, with what is wrong."""
    columns: dict[str, pa.Array | pa.ChunkedArray] = {}
    places = {name: i for i, name in enumerate(table.column_names)}
    if ID in places:
        columns[ID] = table.column(places[ID])
    refused: dict[int, str] = {}
    for name, fit in fitted.items():
        if isinstance(fit, DroppedColumn):
            continue
        if name not in places:
            raise DataError(f"column '{name}' is missing; there are {', '.join(places)}.")
        found = _encode(fit, _cast(name, whole(table.column(places[name])), fit.type, safe=False))
        columns[name] = found.values
        if fit.missing == "flag":
            columns[f"{name}_missing"] = pa.array(found.missing.astype(np.float32))
        elif fit.missing == "error":
            found.wrong |= dict.fromkeys(np.flatnonzero(found.missing).tolist(), "no value")
        for row, what in found.wrong.items():
            refused.setdefault(row, f"column '{name}': {what}")
    encoded = pa.table(columns)
    if refused:
        good = np.ones(table.num_rows, np.bool_)
        good[list(refused)] = False
        encoded = encoded.filter(pa.array(good))
    return encoded, dict(sorted(refused.items()))


def _cast(name: str, values: pa.Array, type_name: str, *, safe: bool) -> pa.Array:
    kind = type_of(type_name)
    if values.type == kind:
        return values
    try:
        if pa.types.is_timestamp(kind) or is_text(values.type):
            return _as_prepared(name, values, type_name)
        return values.cast(kind, safe=safe)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise DataError(f"column '{name}' cannot be read as {kind}: {error}") from None


def _as_prepared(name: str, values: pa.Array, type_name: str) -> pa.Array:
    """Times, and what is written as text, as they were read when the data was prepared."""
    found, wrong = convert(values, type_of(type_name), form_of(type_name))
    if wrong:
        example = values[wrong[0]].as_py()
        raise DataError(f"column '{name}' cannot be read as {type_name}: {example!r} is none")
    return found


# ---- one column


def _encode(fit: Fitted, values: pa.Array) -> _Encoded:
    match fit:
        case ScaledNumbers() | Ranked():
            return _Encoded(*scaled(fit, values))
        case Stacked():
            return _Encoded(*stacked(fit, values))
        case Dates():
            return _Encoded(circles(values, fit.center, fit.scale), nulls(values))
        case Raw():
            return _Encoded(*raw(fit, values))
        case Vocabulary():
            values = plain_numbers(values)
            return _Encoded(indices_of(fit.values, values), nulls(values))
        case Hashed():
            values = plain_numbers(values)
            spread = hash_values(values) % np.uint64(fit.buckets - KNOWN)
            indices = np.where(nulls(values), MISSING, spread.astype(np.int64) + KNOWN)
            return _Encoded(pa.array(indices), nulls(values))
        case Tokens():
            return _tokens(fit, values)
        case Picture():
            pixels, wrong = decode_all(values, fit.shape)
            return _Encoded(pixels, nulls(values), wrong)
        case Classes():
            return _Encoded(pa.array(classes_of(fit, values)), nulls(plain_numbers(values)))
        case DroppedColumn():
            raise AssertionError("it is left out")


def classes_of(fit: Classes, values: pa.Array) -> NDArray[np.int64]:
    """The class of each label; NO_CLASS for what training never saw, and for missing ones."""
    values = _cast("label", plain_numbers(values), fit.type, safe=False)
    return places_of(fit.values, values).fill_null(NO_CLASS).to_numpy()


def _tokens(fit: Tokens, values: pa.Array) -> _Encoded:
    gone = nulls(values)
    if fit.by == "words":
        flat, cuts = words(values)
        tokens = indices_of(fit.values, flat).to_numpy().astype(np.int32)
    elif fit.by == "chars":
        points, cuts = chars(values)
        known = [ord(str(char)) for char in fit.values]
        table = np.full(max(known, default=0) + 2, UNKNOWN, np.int32)
        table[known] = np.arange(KNOWN, KNOWN + len(known), dtype=np.int32)
        tokens = table[np.minimum(points, len(table) - 1)]
    else:
        data, cuts = byte_tokens(values)
        tokens = data.astype(np.int32) + KNOWN
    tokens, cuts = shortened(tokens, cuts, fit.length)
    return _Encoded(token_lists(tokens, cuts, gone, MISSING), gone)


# ---- what comes out


def encoded_schema(schema: Schema, fitted: Mapping[str, Fitted]) -> Schema:
    """Of what `apply` makes of tables with this schema."""
    by_name = {c.name: c for c in schema}
    columns: list[Column] = [c for c in schema if c.name == ID]
    for name, fit in fitted.items():
        column = by_name[name]
        if isinstance(fit, DroppedColumn):
            continue
        kind, shape = _type_and_shape(fit, column)
        columns.append(Column(name, kind, column.role, shape))
        if fit.missing == "flag":
            columns.append(Column(f"{name}_missing", "float32"))
    refuse_clashes(columns)
    return tuple(columns)


def refuse_clashes(schema: Sequence[Column]) -> None:
    """No two columns of a batch may have one name. Beside the columns there are in a batch, for
    each whose records differ in length, NAME_length or NAME_offsets."""
    names = Counter(c.name for c in schema)
    for name, times in names.items():
        if times > 1:
            raise DataError(
                f"there would be two columns '{name}': one is made by --missing, --balance or "
                f"--pack. Rename the other one, or leave it out: --drop {name}"
            )
    ragged = [c.name for c in schema if _is_ragged(type_of(c.type))]
    for name in ragged:
        for made, what in ((f"{name}_length", "lengths"), (f"{name}_offsets", "offsets")):
            if made in names:
                raise DataError(
                    f"there is a column '{made}', which in batches is the name for the {what} of "
                    f"'{name}'. Rename it, or leave it out: --drop {made}"
                )


def _is_ragged(kind: pa.DataType) -> bool:
    """Whether batches hold such values with a length; text is given as it is."""
    return pa.types.is_list(kind) or pa.types.is_binary(kind)


def _type_and_shape(fit: Fitted, column: Column) -> tuple[str, tuple[int, ...]]:
    match fit:
        case ScaledNumbers() | Ranked():
            kind = type_of(column.type)
            if pa.types.is_fixed_size_list(kind):
                return f"float32[{kind.list_size}]", column.shape or (kind.list_size,)
            return "list<float32>" if is_list(kind) else "float32", ()
        case Raw():
            kind = type_of(fit.to)
            fixed = pa.types.is_fixed_size_list(kind)
            return fit.to, (column.shape or (kind.list_size,)) if fixed else ()
        case Stacked():
            return f"float32[{len(fit.members)}]", column.shape or (len(fit.members),)
        case Dates():
            return "float32[7]", (7,)
        case Vocabulary() | Hashed() | Classes():
            return "int64", ()
        case Tokens():
            return "list<int32>", ()
        case Picture():
            return f"uint8[{int(np.prod(fit.shape))}]", fit.shape
        case DroppedColumn():
            raise AssertionError("it is left out")


def sizes(fitted: Mapping[str, Fitted]) -> dict[str, int]:
    """How many indices a column may hold: rows of an embedding, or classes of a label."""
    found: dict[str, int] = {}
    for name, fit in fitted.items():
        match fit:
            case Vocabulary():
                found[name] = len(fit.values) + KNOWN
            case Tokens():
                found[name] = (256 if fit.by == "bytes" else len(fit.values)) + KNOWN
            case Hashed():
                found[name] = fit.buckets
            case Classes():
                found[name] = len(fit.values)
            case _:
                pass
    return found


class Encoders:
    """All encoders of a data set, for serving: the same numbers that training saw."""

    def __init__(self, fitted: Mapping[str, Fitted]) -> None:
        self.fitted = dict(fitted)

    @staticmethod
    def load(data: bytes | str | Mapping[str, Any]) -> "Encoders":
        """From JSON, or from `encoders` of a manifest."""
        try:
            if isinstance(data, Mapping):
                return Encoders(msgspec.convert(dict(data), dict[str, Fitted]))
            return Encoders(msgspec.json.decode(data, type=dict[str, Fitted]))
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            raise DataError(f"these are not encoders: {error}") from None

    def dump(self) -> dict[str, Any]:
        """For a manifest."""
        return msgspec.to_builtins(self.fitted)

    def apply(self, rows: pa.Table | Mapping[str, Sequence[Any]]) -> pa.Table:
        """Encode a table or a dict of columns. Columns that say nothing to a model (label, id,
        group, time, weight) may be left out; what was packed may be given by its columns."""
        for name, fit in self.fitted.items():
            if isinstance(fit, Stacked) and name not in _names(rows):
                rows = _packed(name, fit, rows)
        names = _names(rows)
        used = {n: f for n, f in self.fitted.items() if n in names or _needed(f)}
        if absent := [n for n in used if n not in names]:
            raise DataError(f"these columns are missing: {', '.join(absent)}.")
        if isinstance(rows, Mapping):
            kept = {n: f for n, f in used.items() if not isinstance(f, DroppedColumn)}
            rows = pa.table({n: _array(n, rows[n], f.type) for n, f in kept.items()})
        return apply(used, rows)


def _names(rows: pa.Table | Mapping[str, Any]) -> list[str]:
    return list(rows) if isinstance(rows, Mapping) else rows.column_names


def _packed(
    name: str, fit: Stacked, rows: pa.Table | Mapping[str, Sequence[Any]]
) -> pa.Table | Mapping[str, Any]:
    if any(member not in _names(rows) for member in fit.members):
        return rows
    if not isinstance(rows, Mapping):
        return pack(rows, {name: list(fit.members)})
    kinds = {m: f.type for m, f in fit.members.items()}
    table = pa.table({m: _array(m, rows[m], kind) for m, kind in kinds.items()})
    others = {n: values for n, values in rows.items() if n not in fit.members}
    return {**others, name: pack(table, {name: list(kinds)}).column(name).to_pylist()}


def _needed(fit: Fitted) -> bool:
    return fit.role in ("feature", "text", "image") and not isinstance(fit, DroppedColumn)


def _array(name: str, values: Sequence[Any], type_name: str) -> pa.Array:
    kind = type_of(type_name)
    if not pa.types.is_timestamp(kind):  # Arrow takes any number for microseconds
        try:
            return pa.array(values, kind)
        except (pa.ArrowInvalid, pa.ArrowTypeError):
            pass
    try:
        found = pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise DataError(f"column '{name}' cannot be read as {kind}: {error}") from None
    return _cast(name, found, type_name, safe=True)
