# SPDX-License-Identifier: Apache-2.0
"""The words of prepared data: columns, what they are for, and how they are encoded.

A column has an Arrow type (as text, so that a manifest can hold it), a role and an encoding. Roles
say what a column is for; encodings say how raw values become numbers, and are fitted on the
training split only.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec
import pyarrow as pa

from manyhands.data.columns.time_forms import patterns_of
from manyhands.values.errors import DataError
from manyhands.values.other_words import meant

Role = Literal["feature", "label", "id", "group", "time", "text", "image", "weight", "ignore"]

ROLES: tuple[Role, ...] = (
    "feature",
    "label",
    "id",
    "group",
    "time",
    "text",
    "image",
    "weight",
    "ignore",
)

ID = "_id"
"""The stable unique id of a record: source number << RECORD_BITS | record number in the source."""

RECORD_BITS = 40

MANIFEST = "manifest.json"
"""The file that makes a folder a prepared data set (`shards.manifest`)."""


class Column(msgspec.Struct, frozen=True, omit_defaults=True):
    """One column, raw or encoded."""

    name: str
    type: str
    """An Arrow type, as `type_of` reads it."""
    role: Role = "feature"
    shape: tuple[int, ...] = ()
    """Of one record's value, where it is more than a number and always the same."""


Schema = tuple[Column, ...]

_TYPES: dict[str, pa.DataType] = {
    "null": pa.null(),
    "bool": pa.bool_(),
    "uint8": pa.uint8(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "float32": pa.float32(),
    "float64": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "time": pa.timestamp("us"),
}

_WORDS = {
    "int": "int64",
    "integer": "int64",
    "float": "float64",
    "double": "float64",
    "number": "float64",
    "str": "string",
    "text": "string",
    "bytes": "binary",
    "boolean": "bool",
    "date": "time",
    "timestamp": "time",
}
"""What people write for a type on the command line."""


def type_of(name: str) -> pa.DataType:
    """`int64`, `time`, `time:dmy`, `list<float32>`, `uint8[784]`, and what people write instead."""
    name = name.strip()
    if form_of(name):
        return _TYPES["time"]
    if ":" in name and ("<" in name or "[" in name):
        raise DataError(
            f"'{name}': only for times that are no lists can it be said how to read them."
        )
    if name.startswith("list<") and name.endswith(">"):
        return pa.list_(type_of(name[5:-1]))
    inner, bracket, size = name.partition("[")
    if bracket and size.endswith("]") and size[:-1].isdigit():
        return pa.list_(type_of(inner), int(size[:-1]))
    name = _WORDS.get(name.lower(), name)
    if name not in _TYPES:
        listed = ", ".join(_TYPES)
        raise DataError(f"there is no type '{name}'; use {listed}, time:dmy, list<...> or T[n].")
    return _TYPES[name]


def form_of(name: str) -> str:
    """How text is read as a time: the `dmy` of `time:dmy`; "" where it is not said."""
    word, colon, form = name.strip().partition(":")
    if not colon or _WORDS.get(word.lower(), word) != "time":
        return ""
    patterns_of(form)  # refuses what is none
    return form


def settled_name(name: str) -> str:
    """A type as manifests write it: of what people write for the same type, one."""
    form = form_of(name)
    return f"time:{form}" if form else name_of(type_of(name))


def name_of(kind: pa.DataType) -> str:
    """The name under which `type_of` finds this type; types beside ours get the nearest one."""
    if pa.types.is_fixed_size_list(kind):
        return f"{name_of(kind.value_type)}[{kind.list_size}]"
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return f"list<{name_of(kind.value_type)}>"
    return next(name for name, ours in _TYPES.items() if ours == plain(kind))


def plain(kind: pa.DataType) -> pa.DataType:
    """The type of ours that holds everything `kind` can hold."""
    t = pa.types
    if t.is_dictionary(kind):
        return plain(kind.value_type)
    if t.is_fixed_size_list(kind):
        return pa.list_(plain(kind.value_type), kind.list_size)
    if t.is_list(kind) or t.is_large_list(kind):
        return pa.list_(plain(kind.value_type))
    if t.is_timestamp(kind) or t.is_date(kind):
        return pa.timestamp("us")
    if t.is_uint8(kind) or kind in (pa.int32(), pa.float32(), pa.bool_(), pa.null()):
        return kind
    if t.is_integer(kind):
        return pa.int64()
    if t.is_floating(kind) or t.is_decimal(kind):
        return pa.float64()
    if t.is_binary(kind) or t.is_large_binary(kind) or t.is_fixed_size_binary(kind):
        return pa.binary()
    return pa.string()


def unify(kinds: Iterable[pa.DataType], *, one_is_list: bool = False) -> pa.DataType:
    """The narrowest type of ours that holds all of these; string holds everything.

    `one_is_list`: a value here and a list of such values there are lists (of one).
    """
    every = [plain(kind) for kind in kinds]
    if one_is_list and any(map(_is_list, every)):
        every = [k if _is_list(k) or pa.types.is_null(k) else pa.list_(k) for k in every]
    joined = pa.null()
    for kind in every:
        joined = _join(joined, kind)
    return joined


def _join(a: pa.DataType, b: pa.DataType) -> pa.DataType:
    if a == b or pa.types.is_null(b):
        return a
    if pa.types.is_null(a):
        return b
    numbers = [pa.uint8(), pa.int32(), pa.int64(), pa.float32(), pa.float64()]
    if a in numbers and b in numbers:
        if pa.float32() in (a, b) and {a, b} & {pa.int32(), pa.int64()}:
            return pa.float64()  # a float32 has 24 bits
        return max(a, b, key=numbers.index)
    if _is_list(a) and _is_list(b):
        inner = _join(a.value_type, b.value_type)
        sizes = {k.list_size for k in (a, b) if pa.types.is_fixed_size_list(k)}
        fixed = all(pa.types.is_fixed_size_list(k) for k in (a, b)) and len(sizes) == 1
        return pa.list_(inner, sizes.pop()) if fixed else pa.list_(inner)
    return pa.string()


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind)


def column_of(schema: Sequence[Column], name: str) -> Column:
    for column in schema:
        if column.name == name:
            return column
    names = [c.name for c in schema]
    raise DataError(f"there is no column '{name}'{meant(name, names)}")


def with_roles(schema: Schema, roles: Mapping[str, Role]) -> Schema:
    """The same columns, some with another role."""
    for name in roles:
        column_of(schema, name)
    return tuple(
        msgspec.structs.replace(c, role=roles[c.name]) if c.name in roles else c for c in schema
    )
