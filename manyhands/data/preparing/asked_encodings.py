# SPDX-License-Identifier: Apache-2.0
"""Which column each `--encode` and `--missing` means.

A name means its column, whatever it is for; a pattern means features alone, so that `*=standard`
leaves the label what it is. The name of packed columns means all their numbers together; a pattern
that matches the columns inside means each of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from manyhands.data.columns.schema import Schema
from manyhands.data.encoding.pack_columns import matching
from manyhands.data.encoding.requested_encoding import (
    NUMERIC,
    Encoding,
    Missing,
    parse_encoding,
    with_missing,
)
from manyhands.values.errors import DataError

_BY_PATTERN = ("feature", "text", "image")


@dataclass(frozen=True, slots=True)
class AskedEncodings:
    columns: dict[str, Encoding]
    members: dict[str, Encoding]
    """Of columns that are packed."""
    missing: dict[str, str]
    """Of both, where it is said."""

    def of(self, name: str, default: Encoding) -> Encoding:
        """What was asked for, or the default with what was said about missing values."""
        found = self.columns.get(name) or self.members.get(name)
        return found or with_missing(default, self.missing.get(name, default.missing))

    def missing_of(self, name: str) -> Missing:
        return with_missing(Encoding("standard"), self.missing.get(name, "")).missing


def asked_encodings(
    encode: Mapping[str, str],
    missing: Mapping[str, str],
    raw: Schema,
    packed: Schema,
    groups: Mapping[str, Sequence[str]],
) -> AskedEncodings:
    inside = {member for members in groups.values() for member in members}
    names = dict.fromkeys([*(c.name for c in packed), *(c.name for c in raw)])
    roles = {c.name: c.role for c in (*raw, *packed)}

    def meant(pattern: str) -> list[str]:
        if pattern in names:
            return [pattern]
        found = [n for n in matching(pattern, list(names)) if roles[n] in _BY_PATTERN]
        if not found:
            raise DataError(f"no column matches '{pattern}'; there are {', '.join(names)}.")
        return found

    columns: dict[str, Encoding] = {}
    members: dict[str, Encoding] = {}
    for pattern, text in encode.items():
        encoding, found = parse_encoding(text), meant(pattern)
        for name in found:
            group = groups.get(name, ())
            each = pattern != name and encoding.kind in NUMERIC and {*group} & {*found}
            if name in {c.name for c in packed} and not each:
                columns[name] = encoding
            elif name in inside:
                members[name] = encoding
    said = {name: how for pattern, how in missing.items() for name in meant(pattern)}
    for some in (columns, members):
        some |= {name: with_missing(some[name], said[name]) for name in some if name in said}
    return AskedEncodings(columns, members, said)
