# SPDX-License-Identifier: Apache-2.0
# pyright: reportAttributeAccessIssue=false
# (the functions of pyarrow.compute are made when it is imported)
"""Text as moments: microseconds since 1970, UTC; without a zone, UTC is meant.

Every value is judged by itself, so a column means the same however it is cut. ISO 8601 is
recognised by itself; the other forms are read only where a column is said to be a time. Whether
`3/4/2015` begins with the day nobody can tell: it is null until the form of the column is known
(`date_order` finds it out). Numbers are seconds since 1970, or milli-, micro- or nanoseconds where
seconds would be beyond the year 5138; with a format of the column their digits are the text.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from manyhands.data.columns.time_forms import CLOCK, DAY_FIRST, MONTH_FIRST, patterns_of

TIME = pa.timestamp("us")

_DATE = r"(?P<y>\d{4})-(?P<m>\d\d)-(?P<d>\d\d)"
_ZONE = r"(?P<z>Z|[+-]\d\d(?::?\d\d)?)?"
_ISO = rf"^{_DATE}(?:[ T](?P<h>\d\d)(?::(?P<n>\d\d)(?::(?P<s>\d\d)(?:[.,](?P<f>\d+))?)?)?{_ZONE})?$"
_MONTH = r"(?P<m>[A-Za-z]{3,9})\.?"
_DAY_NAME = r"(?:[A-Za-z]{3,9}\.?,?\s+)?"
_FORMS = (
    _ISO,
    rf"^{_DATE}{CLOCK}",
    rf"^(?P<y>\d{{4}})/(?P<m>\d\d?)/(?P<d>\d\d?){CLOCK}",
    rf"^{_DAY_NAME}(?P<d>\d\d?)[ /-]{_MONTH}[ /-](?P<y>\d{{4}}){CLOCK}",
    rf"^{_DAY_NAME}{_MONTH}\s+(?P<d>\d\d?),?\s+(?P<y>\d{{4}}){CLOCK}",
    rf"^{_DAY_NAME}{_MONTH}\s+(?P<d>\d\d?)\s+(?P<h>\d\d):(?P<n>\d\d):(?P<s>\d\d)\s+"
    r"(?P<z>UTC|GMT)?\s*(?P<y>\d{4})$",
    r"^(?P<y>\d{4})(?P<m>\d\d)(?P<d>\d\d)T(?P<h>\d\d)(?P<n>\d\d)(?P<s>\d\d)" + _ZONE + "$",
)
# What Arrow is given as such, for guessing the type of a Python value costs it half a millisecond.
_NOTHING = pa.scalar(None, pa.string())
_EMPTY = pa.scalar("", pa.string())
_NO_TIME = pa.scalar(None, TIME)
_ZERO = pa.scalar("0", pa.string())
_UTC = pa.scalar("+0000", pa.string())
_WHOLE = r"^-?(?:\d{1,18}|[1-8]\d{18})$"
_DECIMAL = r"^-?\d{1,18}\.\d*$"
_FIRST = 16
_NEXT_CENTURY = 69
_LEAST = -62_135_596_800_000_000
_MOST = 253_402_300_799_999_999
"""The microseconds of the years 1 to 9999."""
_MONTHS = (
    *("january", "february", "march", "april", "may", "june", "july", "august", "september"),
    *("october", "november", "december"),
)
_MONTH_NUMBERS = {"sept": 9} | {n: i for i, m in enumerate(_MONTHS, 1) for n in (m, m[:3])}
_MONTH_NAMES = pa.array(list(_MONTH_NUMBERS), pa.string())


def are_iso_times(texts: pa.Array) -> bool:
    """Whether all of these texts, none of them null, are times in ISO 8601."""
    if _quick(texts) is not None:
        return True
    shaped = pc.all(pc.match_substring_regex(texts, _ISO)).as_py()
    return shaped and not _form(texts, _ISO).null_count


def all_times(texts: pa.Array, form: str = "") -> pa.Array:
    """Texts in any form that we know as times; null where one is something else.

    With `dmy` or `mdy` dates of two numbers and a year are read so; without, only those that mean
    the same both ways. With a format (`%d/%m/%Y`) nothing else is read.
    """
    if "%" in form:
        return _form(texts, patterns_of(form)[0])
    found = _quick(texts)
    if found is not None:
        return found
    found = _in_forms(_epoch(texts), texts, _FORMS)
    if form:
        return _in_forms(found, texts, patterns_of(form))
    day, month = orders(texts)
    return pc.coalesce(found, pc.if_else(pc.equal(day, month), day, _NO_TIME))


def orders(texts: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Dates of two numbers and a year, read with the day first, and with the month first."""
    nothing = pa.nulls(len(texts), TIME)
    return _in_forms(nothing, texts, DAY_FIRST), _in_forms(nothing, texts, MONTH_FIRST)


def _in_forms(found: pa.Array, texts: pa.Array, forms: Sequence[str]) -> pa.Array:
    """What is found, and of the rest what has one of these forms."""
    for form in forms:
        missing = pc.and_(pc.is_null(found), pc.is_valid(texts))
        if not pc.any(missing).as_py():
            break
        of_form = pc.and_(missing, pc.fill_null(pc.match_substring_regex(texts, form), False))
        if pc.any(of_form).as_py():  # quicker to ask than to take apart
            found = pc.replace_with_mask(found, of_form, _form(texts.filter(of_form), form))
    return found


def number_times(numbers: pa.Array, form: str = "") -> pa.Array:
    """Numbers as times; null where there is no such time. With a format (`%Y%m%d`) the digits of
    whole numbers are read so, and others are no times."""
    if "%" not in form:
        return epoch_times(numbers)
    if pa.types.is_integer(numbers.type):
        return all_times(numbers.cast(pa.string()), form)
    return pa.nulls(len(numbers), TIME)


def epoch_times(numbers: pa.Array) -> pa.Array:
    """Seconds since 1970, or a smaller unit, as times; null where there is no such time."""
    good = pc.fill_null(pc.is_finite(numbers), False)
    values = pc.if_else(good, numbers, pa.scalar(0, numbers.type)).to_numpy(zero_copy_only=False)
    unit = np.searchsorted([1e11, 1e14, 1e17], np.abs(values.astype(np.float64)), side="right")
    if values.dtype.kind in "iu":  # stays exact
        values = values.astype(np.int64)
        micros = np.where(unit == 3, values // 1000, values * np.array([10**6, 1000, 1, 0])[unit])
    else:
        micros = np.round(values * np.array([1e6, 1e3, 1.0, 1e-3])[unit])
        micros = np.clip(micros, _LEAST - 1, _MOST + 1).astype(np.int64)
    return _real(micros, good.to_numpy(zero_copy_only=False))


def _quick(texts: pa.Array) -> pa.Array | None:
    """What Arrow reads by itself: ISO 8601, all without a zone or all with one."""
    for kind in (TIME, pa.timestamp("us", "UTC")):
        try:
            pc.cast(texts[:_FIRST], kind)  # because a failure takes as long as there are values
            found = pc.cast(pc.cast(texts, kind), TIME)
        except pa.ArrowInvalid:
            continue
        ends = pc.min_max(pc.cast(found, pa.int64())).as_py()
        if ends["min"] is None or (ends["min"] >= _LEAST and ends["max"] <= _MOST):
            return found
    return None


def _epoch(texts: pa.Array) -> pa.Array:
    found = pa.nulls(len(texts), TIME)
    for form, kind in ((_WHOLE, pa.int64()), (_DECIMAL, pa.float64())):
        numeric = pc.match_substring_regex(texts, form)
        if pc.any(numeric).as_py():
            numbers = pc.cast(pc.if_else(numeric, texts, _NOTHING), kind)
            found = pc.coalesce(found, epoch_times(numbers))
    return found


def _real(micros: NDArray[np.int64], good: NDArray[np.bool_]) -> pa.Array:
    """Times, of those that are good and within the years 1 to 9999."""
    good = good & (micros >= _LEAST) & (micros <= _MOST)
    return pc.cast(pa.array(micros, pa.int64(), mask=~good), TIME)


def _form(texts: pa.Array, form: str) -> pa.Array:
    """Texts of one form as times; null where one is not of it or names no real moment."""
    fields = pc.extract_regex(texts, pattern=form)
    names = {field.name for field in fields.type}

    def text(name: str) -> pa.Array:
        return pc.struct_field(fields, name) if name in names else pa.nulls(len(texts), pa.string())

    def number(values: pa.Array) -> NDArray[np.int64]:
        values = pc.fill_null(values, _ZERO)
        filled = pc.if_else(pc.equal(values, _EMPTY), _ZERO, values)
        return pc.cast(filled, pa.int64()).to_numpy(zero_copy_only=False)

    year, day = number(text("y")), number(text("d"))
    if "c" in names:  # of two digits, as strptime takes them
        year = number(text("c"))
        year = year + np.where(year < _NEXT_CENTURY, 2000, 1900)
    month = _month(text("m"))
    hour, minute, second = number(text("h")), number(text("n")), number(text("s"))
    fraction = number(pc.utf8_slice_codeunits(pc.utf8_rpad(text("f"), 6, "0"), 0, 6))
    half = pc.fill_null(pc.utf8_lower(text("p")), _EMPTY).to_numpy(zero_copy_only=False)
    has_half = half != ""
    good = ~has_half | ((hour >= 1) & (hour <= 12))
    hour = np.where(has_half, hour % 12 + 12 * (half == "pm"), hour)
    offset, good_zone = _zone(text("z"))

    starts = ((year - 1970) * 12 + np.clip(month, 1, 12) - 1).astype("datetime64[M]")
    days = starts.astype("datetime64[D]").astype(np.int64) + day - 1
    ends = (starts + 1).astype("datetime64[D]").astype(np.int64)
    good &= (month >= 1) & (month <= 12) & (day >= 1) & (days < ends) & good_zone
    good &= (hour < 24) & (minute < 60) & (second < 60)
    good &= fields.is_valid().to_numpy(zero_copy_only=False)
    seconds = ((days * 24 + hour) * 60 + minute - offset) * 60 + second
    return _real(seconds * 1_000_000 + fraction, good)


def _month(texts: pa.Array) -> NDArray[np.int64]:
    """1 to 12; 0 where it is no month."""
    names = pc.utf8_lower(pc.fill_null(texts, _EMPTY))
    digits = pc.match_substring_regex(names, r"^\d+$")
    numbers = pc.cast(pc.if_else(digits, names, _ZERO), pa.int64()).to_numpy(zero_copy_only=False)
    places = pc.fill_null(pc.index_in(names, value_set=_MONTH_NAMES), len(_MONTH_NAMES))
    named = np.array([*_MONTH_NUMBERS.values(), 0])[places.to_numpy(zero_copy_only=False)]
    return np.where(digits.to_numpy(zero_copy_only=False), numbers, named).astype(np.int64)


def _zone(texts: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Minutes east of Greenwich, and whether there is such a zone."""
    digits = pc.replace_substring(pc.fill_null(texts, _EMPTY), ":", "")
    shaped = pc.match_substring_regex(digits, r"^[+-]\d\d(\d\d)?$")
    digits = pc.utf8_rpad(pc.if_else(shaped, digits, _UTC), 5, "0")
    number = pc.cast(pc.utf8_slice_codeunits(digits, 1, 5), pa.int64())
    number = number.to_numpy(zero_copy_only=False)
    east = pc.starts_with(digits, "+").to_numpy(zero_copy_only=False)
    minutes = number // 100 * 60 + number % 100
    return np.where(east, minutes, -minutes), (number // 100 < 24) & (number % 100 < 60)
