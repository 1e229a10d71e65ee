# SPDX-License-Identifier: Apache-2.0
"""Encoders with everything they took from the training records: plain data, stored with the shards.

Categories and tokens share the numbering of `vocabulary`. Classes of a label are numbered from 0
in their order.
"""

import sys
from collections.abc import Mapping
from typing import Any, Literal

import msgspec
import pyarrow as pa

from manyhands.data.columns.arrays import compute, is_list, is_number, is_text
from manyhands.data.columns.schema import Column, Role, name_of, type_of
from manyhands.data.encoding.column_facts import ColumnFacts
from manyhands.data.encoding.decode_images import ImageShape
from manyhands.data.encoding.requested_encoding import NUMERIC, Encoding, Missing
from manyhands.data.encoding.vocabulary import KnownValue, as_json, most_common
from manyhands.values.errors import DataError

NO_CLASS = -100
"""The class of a label that training never saw: what torch's losses leave out of account."""


class _FittedColumn(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind"
):
    type: str
    """Of the raw column."""
    role: Role = "feature"
    missing: Missing = ""


class ScaledNumbers(_FittedColumn, frozen=True, tag="scaled"):
    """(x - center) / scale, of logarithms if so."""

    center: float
    scale: float
    fill: float
    """What a missing number is taken for, before it is scaled."""
    log: bool = False


class Ranked(_FittedColumn, frozen=True, tag="ranked"):
    """Evenly over (0, 1), between these quantiles."""

    edges: list[float]
    fill: float


class Dates(_FittedColumn, frozen=True, tag="dates"):
    """Microseconds since 1970, scaled; and the day, the week and the year as circles."""

    center: float
    scale: float


class Raw(_FittedColumn, frozen=True, tag="raw"):
    to: str
    fill: str | int | float


class Vocabulary(_FittedColumn, frozen=True, tag="vocabulary"):
    values: list[KnownValue]


class Hashed(_FittedColumn, frozen=True, tag="hashed"):
    buckets: int
    """Indices in all: UNKNOWN (nothing has it), MISSING, and those that values are spread over."""


class Tokens(_FittedColumn, frozen=True, tag="tokens"):
    by: Literal["words", "chars", "bytes"]
    values: list[KnownValue] = []
    length: int = 0


class Picture(_FittedColumn, frozen=True, tag="picture"):
    shape: ImageShape


class Classes(_FittedColumn, frozen=True, tag="classes"):
    values: list[KnownValue]


class Stacked(_FittedColumn, frozen=True, tag="stacked"):
    """Columns packed into one: each place as its own column would be, all as float32."""

    members: dict[str, ScaledNumbers | Ranked | Raw]


class DroppedColumn(_FittedColumn, frozen=True, tag="dropped"):
    pass


Fitted = (
    ScaledNumbers
    | Ranked
    | Dates
    | Raw
    | Vocabulary
    | Hashed
    | Tokens
    | Picture
    | Classes
    | Stacked
    | DroppedColumn
)


def finish(encoding: Encoding, facts: ColumnFacts) -> Fitted:
    """The encoding with what it needs to know of the training records."""
    _refuse_misfit(encoding, facts)
    column = facts.column
    base: dict[str, Any] = {
        "type": column.type,
        "role": column.role,
        "missing": encoding.missing or _default_missing(encoding, column.role),
    }
    match encoding.kind:
        case "standard" | "minmax" | "log":
            return _scaled(encoding, facts, base)
        case "quantile":
            return Ranked(edges=_edges(encoding, facts), fill=_fill(encoding, facts), **base)
        case "dates":
            assert facts.moments is not None
            scale = facts.moments.deviation or 1.0
            return Dates(center=facts.moments.mean, scale=scale, **base)
        case "raw":
            to = _raw_type(encoding.to, type_of(column.type), column.role)
            return Raw(to=to, fill=_raw_fill(encoding, facts, type_of(to)), **base)
        case "number":
            return Raw(to="float32", fill=_fill(encoding, facts), **base)
        case "vocabulary":
            return Vocabulary(values=most_common(facts.values, encoding), **base)
        case "hash":
            return Hashed(buckets=encoding.most, **base)
        case "words" | "chars" | "bytes":
            values = [] if encoding.kind == "bytes" else most_common(facts.tokens, encoding)
            return Tokens(by=encoding.kind, values=values, length=encoding.length, **base)
        case "image":
            return Picture(shape=_image_shape(encoding, facts), **base)
        case "classes":
            return Classes(values=_classes(facts), **base)
        case "drop":
            return DroppedColumn(**base)


def finish_stacked(
    column: Column, members: Mapping[str, tuple[Encoding, ColumnFacts]], missing: Missing
) -> Stacked:
    """The encoder of packed columns, from those of its members."""
    found: dict[str, ScaledNumbers | Ranked | Raw] = {}
    for name, (encoding, facts) in members.items():
        fit = finish(encoding, facts)
        if not isinstance(fit, ScaledNumbers | Ranked | Raw):
            raise DataError(
                f"--encode {name}={encoding}: '{name}' is packed into '{column.name}', where only "
                "numbers have a place. Leave it out of --pack."
            )
        found[name] = fit
    missing = missing or ("error" if any(f.missing == "error" for f in found.values()) else "")
    return Stacked(type=column.type, role=column.role, missing=missing, members=found)


def _refuse_misfit(encoding: Encoding, facts: ColumnFacts) -> None:
    kind = type_of(facts.column.type)
    inner = kind.value_type if is_list(kind) else kind
    number = is_number(inner) or pa.types.is_boolean(inner)
    match encoding.kind:
        case "number" | "vocabulary" | "hash" | "classes" if is_list(kind):
            fits = False
        case k if k in NUMERIC:
            fits = number
        case "dates":
            fits = pa.types.is_timestamp(kind)
        case "words":
            fits = is_text(inner)
        case "chars":
            fits = is_text(kind)
        case "bytes":
            fits = is_text(kind) or pa.types.is_binary(kind)
        case "image":
            fits = pa.types.is_binary(kind)
        case "raw" if encoding.to:
            fits = number or pa.types.is_timestamp(inner)
        case _:
            fits = True
    if not fits:
        raise DataError(
            f"column '{facts.column.name}' holds {facts.column.type}, which cannot be encoded as "
            f"{encoding}. Choose another encoding, or read it as another type: "
            f"--type {facts.column.name}=..."
        )


def _default_missing(encoding: Encoding, role: Role) -> Missing:
    """Nobody can guess a label or an image."""
    needed = encoding.kind in ("classes", "number", "image") or role == "label"
    return "error" if needed else ""


def _scaled(encoding: Encoding, facts: ColumnFacts, base: dict[str, Any]) -> ScaledNumbers:
    center, spread = 0.0, 0.0
    if encoding.kind == "minmax" and facts.bounds:
        center = float(facts.bounds[0])
        spread = min(float(facts.bounds[1]) - center, sys.float_info.max)
    elif encoding.kind == "log" and facts.logs:
        center, spread = facts.logs.mean, facts.logs.deviation
    elif facts.moments:
        center, spread = facts.moments.mean, facts.moments.deviation
    log = encoding.kind == "log"
    return ScaledNumbers(
        center=center, scale=spread or 1.0, fill=_fill(encoding, facts), log=log, **base
    )


def _fill(encoding: Encoding, facts: ColumnFacts) -> float:
    return facts.moments.mean if facts.moments and encoding.missing != "zero" else 0.0


def _edges(encoding: Encoding, facts: ColumnFacts) -> list[float]:
    if not facts.sketch or not facts.bounds:
        return [0.0, 0.0]
    fractions = [i / encoding.most for i in range(encoding.most + 1)]
    return facts.sketch.quantiles(fractions, *map(float, facts.bounds)).tolist()


def _raw_type(asked: str, kind: pa.DataType, role: Role) -> str:
    """Types of ours that a shard may hold: features as float32, times as int64."""
    if is_list(kind):
        inner = type_of(_raw_type(asked, kind.value_type, role))
        fixed = pa.types.is_fixed_size_list(kind)
        return name_of(pa.list_(inner, kind.list_size) if fixed else pa.list_(inner))
    if asked:
        return asked
    key = role in ("id", "group", "time")
    if pa.types.is_boolean(kind):
        return "bool" if key else "float32"
    if pa.types.is_floating(kind):
        return name_of(kind) if key else "float32"
    return "int64" if pa.types.is_timestamp(kind) else name_of(kind)


def _raw_fill(encoding: Encoding, facts: ColumnFacts, to: pa.DataType) -> str | int | float:
    """The mean, in the column's type; ids, groups and times have none: -1, or no text."""
    to = to.value_type if is_list(to) else to
    if not is_number(to):
        return 0 if pa.types.is_boolean(to) else ""
    if facts.column.role in ("id", "group", "time"):
        return 0 if pa.types.is_uint8(to) else -1
    mean = _fill(encoding, facts)
    return mean if pa.types.is_floating(to) else round(mean)


def _image_shape(encoding: Encoding, facts: ColumnFacts) -> ImageShape:
    found = {size[2] for size in facts.sizes}
    channels = found.pop() if len(found) == 1 else 3
    if encoding.shape:
        height, width, asked = encoding.shape
        return height, width, asked or channels
    sizes = {size[:2] for size in facts.sizes}
    if len(sizes) != 1:
        raise DataError(
            f"the images in '{facts.column.name}' are not of one size; say which one they are to "
            f"have: --encode {facts.column.name}=image:64x64"
        )
    return (*sizes.pop(), channels)


# ---- values that are counted


def _classes(facts: ColumnFacts) -> list[KnownValue]:
    values = facts.values
    if values is None or not len(values):
        raise DataError(f"'{facts.column.name}': no training record has a value.")
    if values.capped:
        raise DataError(f"'{facts.column.name}' has over {len(values):,} different values.")
    return as_json(values.values.take(compute.array_sort_indices(values.values)))
