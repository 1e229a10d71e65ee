# SPDX-License-Identifier: Apache-2.0
# pyright: reportAttributeAccessIssue=false
# (the functions of pyarrow.compute are made when it is imported)
"""Columns of text as columns of numbers, truths, times or text.

White space around a value does not count, and some words mean that it is missing. The type that is
inferred is the narrowest that holds every value: missing, int64, bool, time (ISO 8601 only),
float64, string. Whole numbers that neither int64 nor float64 holds exactly are text: an id that is
rounded is another one. Invariant: the type of a whole column is `schema.unify` of the types of its
parts, so it does not depend on where a file is cut.
"""

import re
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from manyhands.data.columns.exact_integers import is_rounded
from manyhands.data.columns.schema import name_of
from manyhands.data.sources.values.date_order import is_undecided
from manyhands.data.sources.values.dates_in_text import TIME, all_times, are_iso_times
from manyhands.values.errors import DataError

NULLS = ("", "NA", "N/A", "NaN", "nan", "null", "NULL", "None", "?")
"""What stands for a value that is missing."""

TRUE = ("true", "True", "TRUE")
FALSE = ("false", "False", "FALSE")
_YES = ("true", "yes", "t", "y", "1")
_NO = ("false", "no", "f", "n", "0")
"""A column that is said to be bool may have these, in any case."""

# What Arrow is given as such, for guessing the type of a Python value costs it half a millisecond.
_NOTHING = pa.scalar(None, pa.string())
_UNKNOWN = pa.scalar(None, pa.bool_())
_TRUTHS = pa.array(TRUE + FALSE, pa.string())
_YESES = pa.array(_YES, pa.string())
_NOES = pa.array(_NO, pa.string())
_WHOLE = r"^-?[0-9]+$"
_LONG_WHOLE = r"^[+-]?[0-9]{16,}$"
_NUMBER = (
    r"(?i)^[+-]?(?:[0-9]+\.?[0-9]*(?:e[+-]?[0-9]+)?|\.[0-9]+(?:e[+-]?[0-9]+)?|inf|infinity|nan)$"
)
_SHOWN = 60


def cleaned(texts: pa.Array, nulls: pa.Array) -> pa.Array:
    """Without white space around the values; those that mean nothing are null."""
    texts = pc.ascii_trim_whitespace(texts)
    missing = pc.is_in(texts, value_set=nulls)
    return pc.if_else(missing, _NOTHING, texts) if pc.any(missing).as_py() else texts


def without_words(texts: pa.Array, words: Sequence[str]) -> pa.Array:
    """Text as it is, but null where it is one of these words."""
    if not words or not pa.types.is_string(texts.type):
        return texts
    bare = pc.ascii_trim_whitespace(texts)
    missing = pc.is_in(bare, value_set=pa.array(words, pa.string()))
    return pc.if_else(missing, _NOTHING, texts) if pc.any(missing).as_py() else texts


def inferred(texts: pa.Array) -> pa.DataType:
    """The type of a clean column."""
    there = texts.drop_null() if texts.null_count else texts
    if not len(there):
        return pa.null()
    kinds = [kind for kind in _KINDS if _are(there[:1], kind)]  # what the first value rules out
    return next((kind for kind in kinds if _are(there, kind)), pa.string())


_KINDS = (pa.int64(), pa.bool_(), TIME, pa.float64())
"""From narrow to wide."""


def _are(texts: pa.Array, kind: pa.DataType) -> bool:
    if pa.types.is_boolean(kind):
        return pc.all(pc.is_in(texts, value_set=_TRUTHS)).as_py()
    if pa.types.is_timestamp(kind):
        return are_iso_times(texts)
    if _wrong_numbers(texts, kind).any():
        return False
    return pa.types.is_integer(kind) or not _would_be_rounded(texts)


def _would_be_rounded(texts: pa.Array) -> bool:
    """Whether a whole number of these is no float64."""
    long = texts.filter(pc.match_substring_regex(texts, _LONG_WHOLE))
    return any(is_rounded(digits) for digits in long.to_pylist())


def converted(
    texts: pa.Array, kind: pa.DataType, form: str = ""
) -> tuple[pa.Array, NDArray[np.bool_]]:
    """A clean column as `kind`, and which of its values cannot be that (null in the column). As
    text, while nobody knows how to read its dates: without a `form`, see `date_order`."""
    if is_undecided(texts, kind, form):
        kind = pa.string()
    made = _made(texts, kind, form)
    wrong = pc.and_(pc.is_valid(texts), pc.is_null(made))
    return made, wrong.to_numpy(zero_copy_only=False)


def _made(texts: pa.Array, kind: pa.DataType, form: str) -> pa.Array:
    t = pa.types
    if t.is_string(kind) or t.is_binary(kind):
        return texts.cast(kind)
    if t.is_integer(kind) or t.is_floating(kind):
        return _numbers(texts, kind)
    if t.is_timestamp(kind):
        return all_times(texts, form).cast(kind)
    if t.is_boolean(kind):
        lower = pc.utf8_lower(texts)
        yes = pc.is_in(lower, value_set=_YESES)
        known = pc.or_(yes, pc.is_in(lower, value_set=_NOES))
        return pc.if_else(known, yes, _UNKNOWN)
    if t.is_null(kind):
        return pa.nulls(len(texts))
    raise DataError(
        f"a value in a file of text cannot be {kind}; use bool, int64, float64, string or time."
    )


def _numbers(texts: pa.Array, kind: pa.DataType) -> pa.Array:
    wrong = _wrong_numbers(texts, kind)
    if wrong.any():
        texts = pc.if_else(pa.array(wrong), _NOTHING, texts)
    return texts.cast(kind)


def _wrong_numbers(texts: pa.Array, kind: pa.DataType) -> NDArray[np.bool_]:
    """Which values are no numbers of this kind."""
    whole = pa.types.is_integer(kind)
    shaped = pc.match_substring_regex(texts, _WHOLE if whole else _NUMBER)
    wrong = ~pc.fill_null(shaped, True).to_numpy(zero_copy_only=False)
    if whole and not wrong.all():
        wrong[_too_large(texts, np.flatnonzero(~wrong), kind)] = True
    return wrong


def _too_large(texts: pa.Array, rows: NDArray[np.int64], kind: pa.DataType) -> NDArray[np.int64]:
    """Of these rows, which are digits, those whose number `kind` cannot hold."""
    try:
        texts.take(pa.array(rows)).cast(kind)
        return rows[:0]
    except pa.ArrowInvalid:
        if len(rows) == 1:
            return rows
    parts = np.array_split(rows, 2)
    return np.concatenate([_too_large(texts, part, kind) for part in parts])


_SHORT_YEAR = re.compile(
    r"\s*\d\d?(?P<mark>[/.-])(?P<month>\d\d?|[A-Za-z]{3,9})(?P=mark)\d\d(?P<more>\D|$)"
)
"""Dates with a year of two digits, whichever part of them that is."""


def misfit(name: str, text: str, kind: pa.DataType, form: str = "") -> str:
    """What is wrong with a value."""
    shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
    what = f"column '{name}': {shown!r} is no {name_of(kind)}{f':{form}' if form else ''}"
    if pa.types.is_timestamp(kind) and "%" not in form and (short := _SHORT_YEAR.match(text)):
        mark, month = short["mark"], "m" if short["month"].isdigit() else "b"
        example = f"%d{mark}%{month}{mark}%y"
        more = f" (with its time: {example} %H:%M)" if short["more"] else ""
        what += f"; a year of two digits needs a format, as in --type {name}=time:{example}{more}"
    return what


def nulls_of(more: Sequence[str]) -> pa.Array:
    """The words for a missing value."""
    return pa.array(dict.fromkeys([*NULLS, *(word.strip() for word in more)]), pa.string())
