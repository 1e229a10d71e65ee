# SPDX-License-Identifier: Apache-2.0
# pyright: reportAttributeAccessIssue=false
# (the functions of pyarrow.compute are made when it is imported)
"""One line of JSON at a time: what is in it, what is wrong with it, and columns of such values.

Nothing is taken silently: a key that is there twice, half a surrogate pair, anything but an object
makes the record bad, as does a value that a given type cannot hold. -0 is 0. Whole numbers that
neither int64 nor float64 holds exactly make their column text.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from manyhands.data.columns.exact_integers import fits_float64, fits_int64
from manyhands.data.columns.schema import unify
from manyhands.data.sources.cutting.record_boundaries import FoundRecords
from manyhands.data.sources.values.csv_fields import decoded
from manyhands.data.sources.values.date_order import is_undecided
from manyhands.data.sources.values.dates_in_text import TIME, all_times, are_iso_times, number_times
from manyhands.values.errors import DataError

DEPTH = 64
"""Nothing may be nested deeper: readers of JSON call themselves, and break in the depth."""

_QUOTE = ord('"')
_STEPS = np.zeros(256, dtype=np.int8)
_STEPS[[ord("{"), ord("[")]] = 1
_STEPS[[ord("}"), ord("]")]] = -1
_MARKS = _STEPS != 0
_MARKS[_QUOTE] = True
_MOST_DIGITS = 400
"""Of a whole number; what has more is beyond all floats."""


class BadRecord(Exception):
    """What is wrong with a record."""


def is_too_deep(found: FoundRecords) -> bool:
    """Whether a line of these is nested too deep for Arrow's reader, which would not survive it."""
    array = np.frombuffer(found.data, np.uint8)
    opens = np.flatnonzero((array | 0x20) == ord("{"))  # that is [ too
    if len(opens) <= DEPTH:
        return False
    lines = np.searchsorted(found.begins, opens, side="right") - 1
    suspects = np.unique(lines[DEPTH:][lines[DEPTH:] == lines[:-DEPTH]])
    return any(_depth_of(found.record(i)) > DEPTH for i in suspects.tolist())


def _depth_of(data: bytes) -> int:
    """How deep lists and objects are nested; brackets in strings do not count."""
    if b"\\" in data:
        data = data.replace(b"\\\\", b"  ").replace(b'\\"', b"  ")
    array = np.frombuffer(data, np.uint8)
    marks = array[_MARKS[array]]
    inside = np.bitwise_xor.accumulate((marks == _QUOTE).view(np.uint8))
    steps = _STEPS[marks] * (1 - inside.view(np.int8))
    return int(np.cumsum(steps, dtype=np.int32).max(initial=0))


def record_of(raw: bytes, byte: int) -> dict[str, Any]:
    """The object that a line holds; BadRecord where it holds none."""
    text, what = decoded(raw, byte, "utf-8")
    if text is None:
        raise BadRecord(what.partition(";")[0])
    if raw.count(b"{") + raw.count(b"[") > DEPTH and _depth_of(raw) > DEPTH:
        raise BadRecord(f"nested more than {DEPTH} deep")
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        place = byte + len(text[: error.pos].encode())
        raise BadRecord(f"no JSON: {error.msg.lower()} at byte {place:,}") from None
    if not isinstance(value, dict):
        raise BadRecord("not an object ({...})")
    if "\\u" in text:
        try:
            text_of(value).encode()
        except UnicodeEncodeError:
            raise BadRecord("half of a surrogate pair (\\ud800 to \\udfff)") from None
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in made if keys.count(key) > 1)
        raise BadRecord(f"the key {twice!r} is there twice")
    return made


def _whole(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise BadRecord(f"a whole number of {len(digits):,} digits")
    return int(digits)


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_int=_whole)


def leaves(
    value: dict[str, Any], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Everything in an object that is neither an object nor null, by the keys that lead there."""
    for key, inner in value.items():
        if isinstance(inner, dict):
            yield from leaves(inner, (*path, key))
        elif inner is not None:
            yield (*path, key), inner


def kind_of_values(values: Sequence[Any]) -> pa.DataType:
    """The narrowest type that holds all of these."""
    there = set(map(type, values))
    kinds = [pa.bool_()] if bool in there else []
    kinds.append(_kind_of_numbers(values))
    if str in there:
        texts = pa.array([value for value in values if isinstance(value, str)], pa.string())
        kinds.append(TIME if are_iso_times(texts) else pa.string())
    if list in there:
        inside = {type(item) for value in values if isinstance(value, list) for item in value}
        numbers = inside <= {int, float, type(None)}
        lists = (value for value in values if isinstance(value, list))
        inner = _kind_of_numbers([item for value in lists for item in value])
        numbers = numbers and not pa.types.is_string(inner)
        kinds.append(pa.list_(inner) if numbers else pa.string())
    return unify(kinds)


def _kind_of_numbers(values: Sequence[Any]) -> pa.DataType:
    """Of the numbers among these: int64, float64, or text where they would be rounded."""
    whole = [value for value in values if type(value) is int]
    mixed = any(type(value) is float for value in values)
    if not mixed and all(map(fits_int64, whole)):
        return pa.int64() if whole else pa.null()
    return pa.float64() if all(map(fits_float64, whole)) else pa.string()


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def text_of(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def fits(value: Any, kind: pa.DataType) -> bool:
    """Whether a value, not null, can be of this type; a text may still be no time."""
    t = pa.types
    if t.is_string(kind):
        return True
    if t.is_boolean(kind):
        return isinstance(value, bool)
    if t.is_integer(kind):
        whole = isinstance(value, int) and not isinstance(value, bool)
        return whole and _holds(kind, value)
    if t.is_floating(kind):
        return _is_number(value) and (isinstance(value, float) or _is_float(value))
    if t.is_timestamp(kind):  # which texts are times is found for whole columns
        return isinstance(value, str) or _is_number(value)
    if t.is_binary(kind):
        return isinstance(value, str)
    if t.is_list(kind) or t.is_fixed_size_list(kind):
        sized = t.is_list(kind) or (isinstance(value, list) and len(value) == kind.list_size)
        inner = kind.value_type
        return sized and isinstance(value, list) and all(v is None or fits(v, inner) for v in value)
    return False


def _is_float(value: int) -> bool:
    """Whether there are floats as large as this."""
    try:
        return bool(float(value)) or not value
    except OverflowError:
        return False


def _holds(kind: pa.DataType, value: int) -> bool:
    if kind == pa.int64():
        return fits_int64(value)
    try:
        return pa.scalar(value, kind).is_valid
    except (pa.ArrowInvalid, OverflowError):
        return False


def array_of(values: Sequence[Any], kind: pa.DataType, form: str = "") -> pa.Array:
    """Values that fit as a column. `form`: of times in text; while nobody knows it, they stay
    text where it matters."""
    t = pa.types
    if t.is_string(kind):
        return pa.array([None if v is None else text_of(v) for v in values], kind)
    if t.is_timestamp(kind):
        texts = pa.array([v if isinstance(v, str) else None for v in values], pa.string())
        if is_undecided(texts, kind, form):
            return array_of(values, pa.string())
        whole = pa.array([v if isinstance(v, int) and fits_int64(v) else None for v in values])
        whole = whole.cast(pa.int64())
        real = pa.array([v if isinstance(v, float) else None for v in values], pa.float64())
        found = (all_times(texts, form), number_times(whole, form), number_times(real, form))
        return pc.coalesce(*found).cast(kind)
    if t.is_floating(kind):
        reals = pa.array([None if v is None else float(v) for v in values], pa.float64())
        return without_minus_zero(reals).cast(kind, safe=False)
    if t.is_list(kind) and t.is_floating(kind.value_type):
        return float_lists(pa.array(values, pa.list_(pa.float64())), kind)
    if t.is_binary(kind):
        return pa.array([None if v is None else v.encode() for v in values], kind)
    try:
        return pa.array(values, kind)
    except pa.ArrowNotImplementedError:
        raise DataError(f"a value in JSON cannot be {kind}.") from None


def float_lists(column: pa.Array, kind: pa.DataType) -> pa.Array:
    inner = column.type.value_type
    if not (pa.types.is_integer(inner) or pa.types.is_floating(inner) or pa.types.is_null(inner)):
        raise pa.ArrowInvalid(f"no numbers: {inner}")
    lists = column.cast(pa.list_(pa.float64()), safe=False)
    values = without_minus_zero(lists.values)
    made = pa.ListArray.from_arrays(lists.offsets, values, mask=lists.is_null())
    return made.cast(kind, safe=False)


def without_minus_zero(values: pa.Array) -> pa.Array:
    """-0 is 0 for those who read it as a whole number, so it is 0 for all."""
    return pc.add(values, pa.scalar(0.0, pa.float64()))
