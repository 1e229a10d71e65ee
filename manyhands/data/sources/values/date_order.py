# SPDX-License-Identifier: Apache-2.0
# pyright: reportAttributeAccessIssue=false
# (the functions of pyarrow.compute are made when it is imported)
"""Does 03/04/2024 begin with the day? What all values of a column say about it together.

While nobody has said so, a piece with such dates keeps them as text, and it is noted what they show
(`dates_seen`). All pieces together decide (`order_of`), whoever read them and in whatever order:
one value that can be read one way only settles it for the column. Where values contradict each
other, or none decides, people are asked: a date is never guessed.
"""

from collections.abc import Iterable
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from manyhands.data.sources.values.dates_in_text import orders
from manyhands.values.errors import DataError


class DatesSeen(msgspec.Struct, frozen=True):
    """An example of each, the first there is; "" where there is none."""

    day_first: str = ""
    """Can only be read with the day first."""
    month_first: str = ""
    either: str = ""
    """Can be read both ways, as different days."""


class DateOrder(msgspec.Struct, frozen=True):
    form: str
    """`dmy` or `mdy`."""
    example: str
    """The value that decided."""
    either: str

    def note(self, name: str) -> str:
        first, other = ("day", "mdy") if self.form == "dmy" else ("month", "dmy")
        doubtful = f" (so in {self.either} too)" if self.either else ""
        return (
            f"column '{name}': the {first} comes first in {self.example}{doubtful}; "
            f"if not: --type {name}=time:{other}"
        )


def dates_seen(column: pa.Array | pa.ChunkedArray) -> DatesSeen | None:
    """What a column of text shows; None where the order of day and month matters in no value."""
    texts = _texts(column)
    if texts is None:
        return None
    texts = pc.utf8_trim_whitespace(texts)
    day, month = orders(texts)
    if day.null_count == len(day) and month.null_count == len(month):
        return None
    differ = pc.and_(pc.and_(day.is_valid(), month.is_valid()), _flag(pc.not_equal(day, month)))
    seen = DatesSeen(
        _first(texts, pc.and_(day.is_valid(), month.is_null())),
        _first(texts, pc.and_(month.is_valid(), day.is_null())),
        _first(texts, differ),
    )
    return None if seen == DatesSeen() else seen


def is_undecided(column: pa.Array, kind: pa.DataType, form: str) -> bool:
    """Whether a column that is to be a time has to wait for what others show."""
    return pa.types.is_timestamp(kind) and not form and dates_seen(column) is not None


def _texts(column: pa.Array | pa.ChunkedArray) -> pa.Array | None:
    array: Any = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        array = array.flatten()
    return array if pa.types.is_string(array.type) or pa.types.is_large_string(array.type) else None


def _flag(values: pa.Array) -> pa.Array:
    return pc.fill_null(values, False)


def _first(texts: pa.Array, where: pa.Array) -> str:
    place = pc.index(where, True).as_py()
    return texts[place].as_py() if place >= 0 else ""


def order_of(name: str, seen: Iterable[DatesSeen]) -> DateOrder | None:
    """What the pieces of a column, in their order, show together; None where it does not matter.
    DataError where they contradict each other, or where nothing decides."""
    found = list(seen)
    day = next((s.day_first for s in found if s.day_first), "")
    month = next((s.month_first for s in found if s.month_first), "")
    either = next((s.either for s in found if s.either), "")
    if day and month:
        raise DataError(
            f"column '{name}': the day comes first in {day}, and the month in {month}. Mend one "
            f"kind; or say which is right, and the others are bad records: --type {name}=time:dmy "
            f"(day first) or --type {name}=time:mdy (month first)."
        )
    if day or month:
        return DateOrder("dmy" if day else "mdy", day or month, either)
    if either:
        raise DataError(
            f"column '{name}': does {either} begin with the day or the month? No value of the "
            f"column shows it. Say so: --type {name}=time:dmy (day first), --type {name}=time:mdy "
            f"(month first), or a format, such as --type {name}=time:%d/%m/%Y."
        )
    return None
