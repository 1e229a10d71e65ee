# SPDX-License-Identifier: Apache-2.0
"""Which split a record belongs to: a pure function of the record and of a small rule.

So splits never move: not when files are cut otherwise, nor when records are added, nor when other
columns are encoded. Records with the same content are always together; so are, for rules that
draw lots, records with the same id (`linked_records`).

A rule by a quantile of time needs its moment found first (`exact_quantiles`); a rule that links ids
needs the table of links:

    rule = parse_split("time=when:0.8")
    if rule.open:
        ...                                            # rounds of Quantile(rule.cuts)
        rule = msgspec.structs.replace(rule, moments=quantile.found)
    sides = assign(rule, table, contents)              # 0 train, 1 test
"""

import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from itertools import accumulate
from typing import Literal

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from manyhands.data.columns.arrays import is_number, nulls, numbers, whole
from manyhands.data.columns.hashing import NULL, Hashes, fraction, mix64, near
from manyhands.data.columns.schema import ID
from manyhands.data.splitting.linked_records import NO_LINKS, KeyLinks
from manyhands.data.statistics.exact_quantiles import Ints, ordered
from manyhands.values.errors import DataError

Sides = NDArray[np.int8]

NOWHERE = -1
"""The side of a record that the rule cannot place: its time is missing."""

FORMS = """\
  ratio=0.8                   4 of 5 records train, the others test (0.8 alone means the same)
  ratio=0.8:0.1:0.1           train, valid, test
  time=when:0.8               the earliest 4 of 5 train, the others test (or 0.8:0.1:0.1)
  time=when:2015-03-01        before this moment train, from then on test
  group=user:0.8              all records of a user on one side (or 0.8:0.1:0.1)
  segment=region:north,south  these are test, the others train
  none                        all train"""

_NUMBERS = r"\d*\.?\d+(?:[eE]-?\d+)?(?::\d*\.?\d+(?:[eE]-?\d+)?){0,2}"


class SplitRule(msgspec.Struct, frozen=True, omit_defaults=True):
    kind: Literal["none", "ratio", "time", "group", "segment", "folds"]
    parts: tuple[float, ...] = ()
    """What share of the records each split is to have; they sum to 1."""
    column: str = ""
    values: tuple[str, ...] = ()
    """Of `segment`: which are test."""
    at: str = ""
    """Of `time`: the moment as it was written."""
    moments: tuple[int, ...] = ()
    """Of `time` by shares: the first instant of every split but the first, once found."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of the splits, by number."""
        if self.kind == "none":
            return ("train",)
        if self.kind == "folds":
            return tuple(f"fold{i}" for i in range(len(self.parts)))
        return ("train", "valid", "test") if len(self.parts) == 3 else ("train", "test")

    @property
    def cuts(self) -> tuple[float, ...]:
        """The share of all records before each split but the first."""
        return tuple(accumulate(self.parts[:-1]))

    @property
    def open(self) -> bool:
        """Whether its moments must be found first."""
        return self.kind == "time" and not self.at and not self.moments

    @property
    def links(self) -> bool:
        """Whether records with the same id are brought together."""
        return self.kind in ("ratio", "group", "folds")


def parse_split(text: str) -> SplitRule:
    kind, _, rest = text.strip().partition("=")
    match kind:
        case "none" if not rest:
            return SplitRule("none")
        case "ratio" if re.fullmatch(_NUMBERS, rest):
            return SplitRule("ratio", _parts(rest, text))
        case "group" if found := re.fullmatch(rf"(.+?):({_NUMBERS})", rest):
            return SplitRule("group", _parts(found[2], text), found[1])
        case "segment" if found := re.fullmatch(r"([^:]+):(.+)", rest):
            values = tuple(v.strip() for v in found[2].split(",") if v.strip())
            if values:
                return SplitRule("segment", (), found[1], values)
        case "time" if found := re.fullmatch(r"(.+?):(\d{4}-\d\d.*)", rest):
            _date(found[2])  # looked for first: a time of day looks like shares
            return SplitRule("time", (), found[1], at=found[2])
        case "time" if found := re.fullmatch(rf"(.+?):({_NUMBERS})", rest):
            if ":" in found[2] or float(found[2]) <= 1:
                return SplitRule("time", _parts(found[2], text), found[1])
            return SplitRule("time", (), found[1], at=found[2])
        case _:
            pass
    raise DataError(f"'{text}' is not a way to split. Use one of\n{FORMS}")


def folds(count: int, group: str = "") -> SplitRule:
    """`count` parts of equal size; all records of a group in one, where a column is given."""
    if not 2 <= count <= 100:
        raise DataError(f"{count} folds: there must be 2 to 100.")
    return SplitRule("folds", (1 / count,) * count, group)


def _parts(numbers: str, text: str) -> tuple[float, ...]:
    parts = tuple(float(n) for n in numbers.split(":"))
    if len(parts) == 1:
        parts = (parts[0], 1 - parts[0])
    if not all(0 < p < 1 for p in parts) or abs(sum(parts) - 1) > 1e-9:
        raise DataError(
            f"'{text}': the shares must be between 0 and 1 and sum to 1, as in\n{FORMS}"
        )
    return parts


# ---- records


def keys(rule: SplitRule, table: pa.Table, contents: Hashes) -> Hashes:
    """What lots are drawn by. Records without a group are groups of their own."""
    if rule.kind in ("group", "folds") and rule.column:
        groups = near(_column(rule, table))
        return np.where(groups == NULL, contents, groups)
    return contents


def assign(
    rule: SplitRule, table: pa.Table, contents: Hashes, links: KeyLinks | None = None
) -> Sides:
    """The split of every row by number, or NOWHERE.

    `contents`: a hash of all that a record says, without its id. `links`: where there are ids and
    `rule.links`, of `linked(near ids, keys(rule, ...))` over all records.
    """
    match rule.kind:
        case "none":
            return np.zeros(table.num_rows, np.int8)
        case "time":
            return _by_time(rule, _column(rule, table))
        case "segment":
            return _by_value(rule, _column(rule, table))
        case "ratio" | "group" | "folds":
            lots = mix64(rule.kind, (links or NO_LINKS).follow(keys(rule, table, contents)))
            return np.searchsorted(np.array(rule.cuts), fraction(lots), "right").astype(np.int8)


def refuse_empty(rule: SplitRule, counts: Mapping[str, int]) -> None:
    """Complain about a split without records; `counts`: by the splits' names."""
    for name in rule.names:
        if not counts.get(name):
            held = ", ".join(f"{n}: {counts.get(n, 0):,}" for n in rule.names)
            hint = {
                "segment": f"Does '{rule.column}' hold {', '.join(rule.values)}?",
                "group": f"Are there enough different values in '{rule.column}'?",
                "time": f"Are there enough different times in '{rule.column}'?",
            }.get(rule.kind, "Are there enough different records?")
            raise DataError(f"no record falls into the split '{name}' ({held}). {hint}")


def _column(rule: SplitRule, table: pa.Table) -> pa.ChunkedArray:
    if rule.column not in table.column_names:
        there = ", ".join(n for n in table.column_names if n != ID)
        raise DataError(f"split by '{rule.column}': there is no such column; there are {there}.")
    return table.column(rule.column)


def instants(rule: SplitRule, table: pa.Table) -> Ints:
    """The times of the rows that have one, as integers in their order; for `Quantile`."""
    times, there = _instants(rule.column, _column(rule, table))
    return times[there]


def _instants(name: str, column: pa.ChunkedArray) -> tuple[Ints, NDArray[np.bool_]]:
    values = whole(column)
    if pa.types.is_timestamp(values.type) or pa.types.is_integer(values.type):
        return numbers(values).astype(np.int64), ~nulls(values)
    if pa.types.is_floating(values.type):
        found = numbers(values).astype(np.float64)
        return ordered(found), ~(nulls(values) | np.isnan(found))
    if pa.types.is_null(values.type):
        return np.zeros(len(values), np.int64), np.zeros(len(values), np.bool_)
    raise DataError(
        f"split by time: column '{name}' holds {values.type}, not times or numbers. "
        f"If it can be read as times, say so: --type {name}=time"
    )


def _by_time(rule: SplitRule, column: pa.ChunkedArray) -> Sides:
    assert not rule.open, "the moments must be found first"
    times, there = _instants(rule.column, column)
    moments = rule.moments or (_moment(rule, column.type),)
    sides = np.searchsorted(np.array(moments, np.int64), times, "right").astype(np.int8)
    return np.where(there, sides, np.int8(NOWHERE))


def _moment(rule: SplitRule, kind: pa.DataType) -> int:
    """The moment as it was written, on the scale of `_instants`."""
    if not is_number(kind):
        since = _date(rule.at) - datetime(1970, 1, 1, tzinfo=UTC)
        return (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds
    try:
        number = float(rule.at)
    except ValueError:
        raise DataError(
            f"split by time: '{rule.column}' holds numbers, so the moment must be one too: "
            f"time={rule.column}:893286638. Or read it as times: --type {rule.column}=time"
        ) from None
    if pa.types.is_floating(kind):
        return int(ordered(np.array([number]))[0])
    return int(rule.at) if rule.at.isdigit() else math.ceil(number)


def _date(text: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise DataError(
            f"'{text}' is not a moment; write 2015-03-01 or 2015-03-01T12:30:00. The ways to split "
            f"are\n{FORMS}"
        ) from None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _by_value(rule: SplitRule, column: pa.ChunkedArray) -> Sides:
    texts = pa.array(rule.values, pa.string())
    try:
        wanted = near(texts if pa.types.is_null(column.type) else texts.cast(column.type))
    except pa.ArrowInvalid:
        raise DataError(
            f"split by segment: '{rule.column}' holds {column.type}, and "
            f"{', '.join(rule.values)} cannot be read as such."
        ) from None
    return np.isin(near(column), wanted).astype(np.int8)
