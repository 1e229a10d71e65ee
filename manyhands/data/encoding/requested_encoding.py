# SPDX-License-Identifier: Apache-2.0
"""How a column is to be encoded, as people write it: `standard`, `vocabulary:1000`, `image:32x32`.

What an encoding takes from the training records is found by `column_facts`; both together make
something that can be applied (`fitted_encoders`).
"""

from typing import Literal, get_args

import msgspec

from manyhands.data.columns.schema import name_of, type_of
from manyhands.values.errors import DataError

EncodingKind = Literal[
    "vocabulary",
    "hash",
    "standard",
    "minmax",
    "quantile",
    "log",
    "raw",
    "dates",
    "words",
    "chars",
    "bytes",
    "image",
    "classes",
    "number",
    "drop",
]
Missing = Literal["", "mean", "zero", "flag", "error"]
"""What becomes of a missing value; left out, the mean for numbers and an index of its own for
categories; `flag` does the same and adds a column NAME_missing of 0 and 1."""

NUMERIC: frozenset[EncodingKind] = frozenset(("standard", "minmax", "quantile", "log", "number"))
CATEGORIES: frozenset[EncodingKind] = frozenset(("vocabulary", "hash"))
TOKENS: frozenset[EncodingKind] = frozenset(("words", "chars", "bytes"))

FORMS = """\
  standard                      (x - mean) / standard deviation; for lists, of all their numbers
  minmax                        (x - least) / (most - least)
  log                           standard, of log(1 + x)
  quantile[:BINS]               by rank, evenly over (0, 1)
  raw[:TYPE]                    as it is (raw:uint8, raw:float32)
  vocabulary[:MOST[:SEEN]]      an index for each of the MOST frequent values seen SEEN times
  hash:SIZE                     one of SIZE indices, by hash: no vocabulary is kept
  dates                         time, and where in the day, the week and the year it is
  words|chars[:MOST[:LENGTH]]   text as a list of indices, at most LENGTH of them
  bytes[:LENGTH]                text as a list of its bytes
  image:HxW[xC]                 decoded and resized
  classes, number               for labels
  drop                          leave it out
each with :missing=mean, zero, flag or error"""


class Encoding(msgspec.Struct, frozen=True, omit_defaults=True):
    kind: EncodingKind
    most: int = 0
    """vocabulary, words, chars: how many values at most. hash: how many indices. quantile: bins."""
    seen: int = 1
    """vocabulary: how often a value must have been seen."""
    length: int = 0
    """words, chars, bytes: how many at most; 0 for all."""
    shape: tuple[int, ...] = ()
    """image: height, width, channels; 0 channels for those that the images have."""
    to: str = ""
    """raw: the type."""
    missing: Missing = ""

    def __str__(self) -> str:
        match self.kind:
            case "vocabulary" if self.seen > 1:
                options: list[object] = [self.most, self.seen]
            case "words" | "chars" if self.length:
                options = [self.most, self.length]
            case "image" if self.shape:
                options = ["x".join(str(n) for n in self.shape if n)]
            case _:
                options = [o for o in (self.most, self.length, self.to) if o]
        if self.missing:
            options.append(f"missing={self.missing}")
        return ":".join(map(str, (self.kind, *options)))


DEFAULT_MOST: dict[EncodingKind, int] = {
    "vocabulary": 1_000_000,
    "quantile": 1000,
    "words": 30_000,
    "chars": 30_000,
}


def parse_encoding(text: str, missing: str = "") -> Encoding:
    """`missing`: where it is given on its own."""
    kind, *options = text.strip().split(":")
    if kind not in get_args(EncodingKind):
        raise DataError(f"there is no encoding '{kind}'. Use one of\n{FORMS}")
    for option in [o for o in options if o.startswith("missing=")]:
        missing = option.removeprefix("missing=")
        options.remove(option)
    try:
        encoding = _with_options(msgspec.convert(kind, EncodingKind), options)
    except ValueError:
        raise DataError(f"'{text}' is not an encoding. Use one of\n{FORMS}") from None
    return with_missing(encoding, missing)


def with_missing(encoding: Encoding, missing: str) -> Encoding:
    if missing not in get_args(Missing):
        raise DataError(f"missing={missing}: use mean, zero, flag or error.")
    if missing in ("mean", "zero") and encoding.kind in CATEGORIES | TOKENS:
        raise DataError(
            f"{encoding}: a missing value gets an index of its own; missing={missing} is for "
            "numbers. Use flag or error, or leave it out."
        )
    return msgspec.structs.replace(encoding, missing=msgspec.convert(missing, Missing))


def _with_options(kind: EncodingKind, options: list[str]) -> Encoding:
    """ValueError where they do not fit."""
    match kind, options:
        case "raw", [to]:
            return Encoding(kind, to=name_of(type_of(to)))
        case "image", [size]:
            return Encoding(kind, shape=_shape(size))
        case "hash", [size]:
            return Encoding(kind, most=_number(size, 3))
        case "bytes", [length]:
            return Encoding(kind, length=_number(length))
        case (("quantile" | "vocabulary" | "words" | "chars"), []):
            return Encoding(kind, most=DEFAULT_MOST[kind])
        case (("quantile" | "vocabulary" | "words" | "chars"), [most]):
            return Encoding(kind, most=_number(most, 2))
        case "vocabulary", [most, seen]:
            return Encoding(kind, most=_number(most), seen=_number(seen))
        case (("words" | "chars"), [most, length]):
            return Encoding(kind, most=_number(most), length=_number(length))
        case _, [] if kind != "hash":
            return Encoding(kind)
        case _:
            raise ValueError


def _number(text: str, least: int = 1) -> int:
    number = int(text)
    if number < least:
        raise ValueError
    return number


def _shape(text: str) -> tuple[int, ...]:
    shape = tuple(_number(n) for n in text.split("x"))
    if len(shape) == 2:
        return (*shape, 0)
    if len(shape) != 3 or shape[2] not in (1, 3, 4):
        raise ValueError
    return shape
