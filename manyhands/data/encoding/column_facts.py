# SPDX-License-Identifier: Apache-2.0
"""What encoders need to know of the training records, from one pass over them: a map and a reduce.

`collect` looks at a piece, `merge` joins what was found in all pieces, in their order. Numbers are
summed without rounding (`moments`) and ranked without regard to order (`quantile_sketch`), so facts
do not depend on how records were cut in pieces; only where a column has more distinct values than
can be held may its rarest ones (`value_counts`). Only what some encoding of a column may want is
collected.

NaN and infinite numbers count as missing.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from manyhands.data.columns.arrays import (
    compute,
    inner,
    is_bytes,
    is_list,
    is_number,
    is_text,
    nulls,
    numbers,
    whole,
)
from manyhands.data.columns.schema import Column, Schema, type_of
from manyhands.data.encoding.decode_images import ImageShape, shape_of
from manyhands.data.encoding.requested_encoding import NUMERIC, Encoding, EncodingKind
from manyhands.data.encoding.tokenize_text import chars, words
from manyhands.data.statistics import quantile_sketch as sketching
from manyhands.data.statistics import value_counts as counting
from manyhands.data.statistics.moments import Moments, moments
from manyhands.data.statistics.quantile_sketch import Sketch
from manyhands.data.statistics.value_counts import ValueCounts, ValueTally

SIZES = 8
"""Different sizes of images that are remembered."""
COMMON = 10
"""Values that `statistics` lists."""


class PieceFacts(msgspec.Struct, omit_defaults=True):
    """What one piece says of a column."""

    column: Column
    count: int = 0
    missing: int = 0
    bounds: tuple[int | float, int | float] | None = None
    moments: Moments | None = None
    logs: Moments | None = None
    values: bytes | None = None
    tokens: bytes | None = None
    sketch: Sketch | None = None
    lengths: Moments | None = None
    longest: int = 0
    sizes: list[ImageShape] = []
    infinite: int = 0


@dataclass(frozen=True, slots=True)
class ColumnFacts:
    """What is known of a column."""

    column: Column
    count: int
    """Records with a value."""
    missing: int
    bounds: tuple[int | float, int | float] | None
    """The least and the greatest number, or time in microseconds."""
    moments: Moments | None
    logs: Moments | None
    """Of `log_of` the numbers."""
    values: ValueCounts | None
    tokens: ValueCounts | None
    sketch: Sketch | None
    lengths: Moments | None
    """Of text in characters, of lists in elements."""
    longest: int
    sizes: tuple[ImageShape, ...]
    """Of images; all sizes there are, or SIZES of them."""
    infinite: int = 0
    """Of the missing ones: numbers that are infinite."""

    @property
    def constant(self) -> bool:
        """Whether there is at most one value, and no missing ones beside it."""
        if self.count == 0:
            return True
        one = self.bounds is not None and self.bounds[0] == self.bounds[1]
        one = one or (self.values is not None and len(self.values) == 1)
        return one and not self.missing and not is_list(type_of(self.column.type))


def log_of(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """log(1 + x), continued to negative numbers in a mirror."""
    return np.sign(values) * np.log1p(np.abs(values))


def wanted(column: Column, encoding: Encoding | None) -> set[str]:
    """Which facts some encoding of this column needs; without one given, its default."""
    kind, data = column.role, type_of(column.type)
    asked: EncodingKind | None = encoding.kind if encoding else None
    if asked in ("drop", "hash", "bytes") or kind in ("ignore", "id"):
        return set()
    facts: set[str] = set()
    if asked in ("vocabulary", "classes"):
        facts.add("values")
    if asked in ("words", "chars"):
        facts |= {asked, "lengths"}
    if asked in ("log", "quantile"):
        facts.add(asked)
    if asked in NUMERIC | {"raw", "dates"}:
        facts.add("moments")
    if asked == "image" or (asked is None and kind == "image"):
        facts.add("sizes")
    if asked is not None:
        return facts
    if kind == "text" or (pa.types.is_list(data) and is_text(data.value_type)):
        return facts | {"words", "lengths"}
    if kind == "label" and not is_list(data) and not pa.types.is_floating(data):
        return facts | {"values", "moments"}
    if kind in ("feature", "label") and (is_text(data) or pa.types.is_boolean(data)):
        return facts | {"values", "moments"}
    return facts | {"moments"}


# ---- map


def collect(table: pa.Table, schema: Schema, encodings: Mapping[str, Encoding]) -> bytes:
    """What a piece's training records say of every column."""
    places = {name: i for i, name in enumerate(table.column_names)}
    parts = {
        c.name: _part(c, whole(table.column(places[c.name])), wanted(c, encodings.get(c.name)))
        for c in schema
        if c.name in places
    }
    return msgspec.msgpack.encode(parts)


def _part(column: Column, values: pa.Array, wants: set[str]) -> PieceFacts:
    kind = values.type
    part = PieceFacts(column, len(values) - values.null_count, values.null_count)
    if is_list(kind) and is_number(kind.value_type):
        part.lengths, part.longest = _lengths(compute.list_value_length(values))
        _about_numbers(part, inner(values.drop_null())[0], wants)
    elif is_number(kind) or pa.types.is_boolean(kind) or pa.types.is_timestamp(kind):
        there = _about_numbers(part, values, wants)
        part.count, part.missing = there, len(values) - there
        if "values" in wants:
            part.values = counting.count(plain_numbers(values)).dump()
    elif is_bytes(kind) or is_list(kind):
        _about_text(part, values, wants)
    return part


def _about_numbers(part: PieceFacts, values: pa.Array, wants: set[str]) -> int:
    """How many numbers there are."""
    found = numbers(values)
    there = ~nulls(values)
    if found.dtype.kind == "f":
        part.infinite = int((np.isinf(found) & there).sum())
        there &= np.isfinite(found)
    found = found if there.all() else found[there]
    if len(found):
        part.bounds = (found.min().item(), found.max().item())
    if "moments" in wants:
        part.moments = moments(found)
    if "log" in wants:
        part.logs = moments(log_of(found.astype(np.float64)))
    if "quantile" in wants:
        part.sketch = sketching.sketch(found)
    return len(found)


def _about_text(part: PieceFacts, values: pa.Array, wants: set[str]) -> None:
    if "values" in wants and not is_list(values.type):
        part.values = counting.count(values).dump()
    if "lengths" in wants:
        sized = compute.list_value_length if is_list(values.type) else compute.binary_length
        sized = compute.utf8_length if is_text(values.type) else sized
        part.lengths, part.longest = _lengths(sized(values))
    if "words" in wants and (is_text(values.type) or is_list(values.type)):
        part.tokens = counting.count(words(values)[0]).dump()
    if "chars" in wants and is_text(values.type):
        part.tokens = counting.count(pa.array(chars(values)[0])).dump()
    if "sizes" in wants and not is_text(values.type):
        found = {shape_of(data.as_py()) for data in values if data.is_valid} - {None}
        part.sizes = sorted(f for f in found if f is not None)[:SIZES]


def _lengths(sizes: pa.Array) -> tuple[Moments, int]:
    there = sizes.drop_null().to_numpy()
    return moments(there), int(there.max()) if len(there) else 0


def plain_numbers(values: pa.Array) -> pa.Array:
    """Floats with one kind of zero, and null for NaN and infinity; others as they are."""
    if not pa.types.is_floating(values.type):
        return values
    found = numbers(values)
    gone = nulls(values) | ~np.isfinite(found)
    return pa.array(found + 0.0, values.type, mask=gone)


# ---- reduce


def merge(parts: Iterable[bytes]) -> dict[str, ColumnFacts]:
    """The facts of every column, from all pieces in their order."""
    decoder = msgspec.msgpack.Decoder(dict[str, PieceFacts])
    sums: dict[str, _SumOfPieces] = {}
    for data in parts:
        for name, part in decoder.decode(data).items():
            sums.setdefault(name, _SumOfPieces(part.column)).add(part)
    return {name: found.facts() for name, found in sums.items()}


class _SumOfPieces:
    """The parts of one column, added up."""

    def __init__(self, column: Column) -> None:
        self.part = PieceFacts(column)
        self.values, self.tokens = ValueTally(), ValueTally()

    def add(self, new: PieceFacts) -> None:
        old = self.part
        for tally, data in ((self.values, new.values), (self.tokens, new.tokens)):
            if data is not None:
                tally.add(ValueCounts.load(data))
        if new.sketch and old.sketch:
            new.sketch = sketching.merged([old.sketch, new.sketch])
        if new.bounds and old.bounds:
            (low, high), (least, most) = old.bounds, new.bounds
            new.bounds = min(low, least), max(high, most)
        self.part = PieceFacts(
            old.column,
            old.count + new.count,
            old.missing + new.missing,
            new.bounds or old.bounds,
            _added(old.moments, new.moments),
            _added(old.logs, new.logs),
            sketch=new.sketch or old.sketch,
            lengths=_added(old.lengths, new.lengths),
            longest=max(old.longest, new.longest),
            sizes=sorted({*old.sizes, *new.sizes})[:SIZES],
            infinite=old.infinite + new.infinite,
        )

    def facts(self) -> ColumnFacts:
        part = self.part
        return ColumnFacts(
            column=part.column,
            count=part.count,
            missing=part.missing,
            bounds=part.bounds,
            moments=part.moments,
            logs=part.logs,
            values=self.values.total(),
            tokens=self.tokens.total(),
            sketch=part.sketch,
            lengths=part.lengths,
            longest=part.longest,
            sizes=tuple(part.sizes),
            infinite=part.infinite,
        )


def _added(a: Moments | None, b: Moments | None) -> Moments | None:
    return a + b if a and b else a or b


def statistics(facts: ColumnFacts) -> dict[str, Any]:
    """For people and manifests; values in the column's own terms."""
    told: dict[str, Any] = {"count": facts.count, "missing": facts.missing}
    if facts.infinite:
        told["infinite"] = facts.infinite
    if facts.bounds:
        told["least"], told["most"] = (_shown(facts, b) for b in facts.bounds)
    if facts.moments and facts.count:
        told["mean"] = _shown(facts, facts.moments.mean)
        if not _is_time(facts):
            told["deviation"] = facts.moments.deviation
    if facts.lengths and facts.count:
        told["length"] = {"mean": facts.lengths.mean, "most": facts.longest}
    for word, counted in (("values", facts.values), ("tokens", facts.tokens)):
        if counted is not None:
            told[f"distinct {word}"] = f"over {len(counted):,}" if counted.capped else len(counted)
            values = zip(counted.values[:COMMON], counted.counts[:COMMON].tolist(), strict=True)
            told[f"common {word}"] = {_label(v.as_py(), word): n for v, n in values}
    if facts.sizes:
        told["sizes"] = ["x".join(map(str, size)) for size in facts.sizes]
    return told


def _is_time(facts: ColumnFacts) -> bool:
    return pa.types.is_timestamp(type_of(facts.column.type))


def _shown(facts: ColumnFacts, value: int | float) -> Any:
    return str(pa.scalar(int(value), pa.timestamp("us"))) if _is_time(facts) else value


def _label(value: Any, word: str) -> str:
    if word == "tokens" and isinstance(value, int):
        return chr(value)
    text = value.decode(errors="replace") if isinstance(value, bytes) else str(value)
    return text if len(text) <= 60 else text[:59] + "…"
