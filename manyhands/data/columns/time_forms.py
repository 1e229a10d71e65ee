# SPDX-License-Identifier: Apache-2.0
"""How times are written, where somebody says so: `dmy`, `mdy`, or a format such as `%d/%m/%Y`.

A form is part of a column's type (`time:dmy`), so that whoever reads the column later, to prepare
more data or to serve, reads it the same way. Here a form is a list of patterns whose groups are the
parts of a moment: y, or c for a year of two digits, m, d, h, n, s, f, p (am or pm) and z.
"""

import re

from manyhands.values.errors import DataError

CLOCK = (
    r"(?:[ T:]\s*(?P<h>\d\d?):(?P<n>\d\d)(?::(?P<s>\d\d)(?:[.,](?P<f>\d+))?)?"
    r"\s*(?P<p>[AaPp][Mm])?\s*(?P<z>Z|UTC|GMT|[+-]\d\d(?::?\d\d)?)?)?$"
)
_DAY, _MONTH, _YEAR = r"(?P<d>\d\d?)", r"(?P<m>\d\d?)", r"(?P<y>\d{4})"
DAY_FIRST = tuple(rf"^{_DAY}{mark}{_MONTH}{mark}{_YEAR}{CLOCK}" for mark in ("/", r"\.", "-"))
MONTH_FIRST = tuple(rf"^{_MONTH}{mark}{_DAY}{mark}{_YEAR}{CLOCK}" for mark in ("/", r"\.", "-"))
_ORDERS = {"dmy": DAY_FIRST, "mdy": MONTH_FIRST}

_NAME = r"[A-Za-z]{3,9}\.?"
_CODES = {
    "Y": _YEAR,
    "y": r"(?P<c>\d\d)",
    "m": _MONTH,
    "b": r"(?P<m>[A-Za-z]{3,9})\.?",
    "B": r"(?P<m>[A-Za-z]{3,9})\.?",
    "d": _DAY,
    "a": _NAME,
    "A": _NAME,
    "H": r"(?P<h>\d\d?)",
    "I": r"(?P<h>\d\d?)",
    "M": r"(?P<n>\d\d?)",
    "S": r"(?P<s>\d\d?)",
    "f": r"(?P<f>\d{1,9})",
    "p": r"(?P<p>[AaPp][Mm])",
    "z": r"(?P<z>Z|UTC|GMT|[+-]\d\d(?::?\d\d)?)",
    "%": "%",
}
"""Those of strptime that name a part of a moment."""
_NEEDED = ("y", "m", "d")


def patterns_of(form: str) -> tuple[str, ...]:
    """All ways of writing that a form means; DataError where there is no such form."""
    return _ORDERS[form] if form in _ORDERS else (_pattern(form),)


def _pattern(form: str) -> str:
    parts = re.findall(r"%.|[^%]+|%$", form, re.DOTALL)
    codes = [part[1:] for part in parts if part.startswith("%")]
    if not codes or any(code not in _CODES for code in codes):
        known = " ".join(f"%{code}" for code in _CODES)
        raise DataError(
            f"times cannot be written as '{form}'; use time:dmy (day first), time:mdy (month "
            f"first), or a format of {known}: time:%d/%m/%Y."
        )
    pattern = "".join(_CODES[p[1:]] if p.startswith("%") else re.escape(p) for p in parts)
    groups = re.findall(r"\?P<(\w)>", pattern)
    named = {"y" if group == "c" else group for group in groups}
    if len(set(groups)) < len(groups) or {"y", "c"} <= {*groups} or not named.issuperset(_NEEDED):
        raise DataError(f"'{form}' must name year, month and day, and nothing twice: %d/%m/%Y.")
    return f"^{pattern}$"
