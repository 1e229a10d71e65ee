# SPDX-License-Identifier: Apache-2.0
"""Which encoding a column gets when nobody asked for one, and why."""

import pyarrow as pa

from manyhands.data.columns.arrays import is_list, is_number, is_text
from manyhands.data.columns.schema import Column, type_of
from manyhands.data.encoding.column_facts import ColumnFacts
from manyhands.data.encoding.requested_encoding import DEFAULT_MOST, Encoding
from manyhands.values.errors import DataError

ChosenEncoding = tuple[Encoding, str]

CLASSES = 1000
"""Whole-numbered labels with more different values than this are numbers."""
VOCABULARY = 100_000
"""Text with more different values than this is hashed."""
BUCKETS = 1 << 18


def choose(column: Column, facts: ColumnFacts) -> ChosenEncoding:
    """An encoding and the reason for it."""
    kind = type_of(column.type)
    match column.role:
        case "ignore":
            return Encoding("drop"), "it is to be ignored"
        case "id" | "group" | "time":
            return Encoding("raw"), f"{column.role}, not a feature"
        case "label":
            return _label(column, facts, kind)
        case _ if not facts.count:
            return Encoding("drop"), "no training record has a value"
        case "weight":
            return Encoding("raw", to="float32"), "a weight"
        case "image":
            return _image(column, facts, kind)
        case "text":
            return _text(column, kind)
        case "feature":
            return _feature(facts, kind)


def _label(column: Column, facts: ColumnFacts, kind: pa.DataType) -> ChosenEncoding:
    if not facts.count:
        raise DataError(f"label '{column.name}': no training record has a value.")
    if is_list(kind):
        return Encoding("raw"), "a label that is a list"
    if pa.types.is_floating(kind):
        return Encoding("number"), "a label with fractions"
    if pa.types.is_timestamp(kind):
        raise DataError(
            f"label '{column.name}' is a time; say what is to be learnt: "
            f"--encode {column.name}=classes or --type {column.name}=int64"
        )
    assert facts.values is not None
    many = facts.values.capped or len(facts.values) > CLASSES
    if many and pa.types.is_integer(kind):
        return Encoding("number"), f"more than {CLASSES:,} different whole numbers"
    if facts.values.capped:
        raise DataError(f"label '{column.name}' has over {len(facts.values):,} different values.")
    return Encoding("classes"), f"{len(facts.values):,} different labels"


def _image(column: Column, facts: ColumnFacts, kind: pa.DataType) -> ChosenEncoding:
    if is_list(kind):
        return Encoding("raw"), "pixels already"
    sizes = {size[:2] for size in facts.sizes}
    if len(sizes) != 1:
        found = ", ".join("x".join(map(str, size)) for size in facts.sizes) or "none"
        raise DataError(
            f"the images in '{column.name}' are not of one size (found: {found}). Say which one "
            f"they are to have: --encode {column.name}=image:64x64"
        )
    channels = {size[2] for size in facts.sizes}
    shape = (*sizes.pop(), channels.pop() if len(channels) == 1 else 3)
    return Encoding("image", shape=shape), "the size of all of them"


def _text(column: Column, kind: pa.DataType) -> ChosenEncoding:
    if is_text(kind) or (is_list(kind) and is_text(kind.value_type)):
        return Encoding("words", most=DEFAULT_MOST["words"]), "text"
    if pa.types.is_binary(kind):
        return Encoding("bytes"), "bytes to read as text"
    raise DataError(f"text '{column.name}' holds {column.type}, which is not text.")


def _feature(facts: ColumnFacts, kind: pa.DataType) -> ChosenEncoding:
    if facts.constant:
        return Encoding("drop"), "all training records have the same value"
    if is_number(kind):
        if facts.bounds and facts.bounds[0] == facts.bounds[1]:
            return Encoding("standard", missing="flag"), "one value, or none: that it is missing"
        return Encoding("standard"), "numbers"
    if pa.types.is_boolean(kind):
        return Encoding("raw", to="float32"), "yes or no"
    if pa.types.is_timestamp(kind):
        return Encoding("dates"), "times"
    if is_text(kind):
        assert facts.values is not None
        if facts.values.capped or len(facts.values) > VOCABULARY:
            return Encoding("hash", most=BUCKETS), f"more than {VOCABULARY:,} different values"
        most = DEFAULT_MOST["vocabulary"]
        return Encoding("vocabulary", most=most), f"{len(facts.values):,} different values"
    if is_list(kind) and is_text(kind.value_type):
        return Encoding("words", most=DEFAULT_MOST["words"]), "lists of words"
    if is_list(kind):
        return Encoding("raw"), "lists of numbers"
    return Encoding("drop"), "bytes: give it the role image or text, or an encoding"
