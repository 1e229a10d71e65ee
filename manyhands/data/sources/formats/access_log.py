# SPDX-License-Identifier: Apache-2.0
# pyright: reportAttributeAccessIssue=false
# (the functions of pyarrow.compute are made when it is imported)
"""Web access logs.

A web server writes a line for each request, in the common log format or the combined one, which
adds the referring page and the agent. A hyphen stands for what is not known. Lines in neither
format are bad.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from manyhands.data.sources.access import files
from manyhands.data.sources.cutting.record_boundaries import (
    MAX_FIELD,
    FoundRecords,
    RecordRule,
    records_of,
)
from manyhands.data.sources.cutting.source import Chunk, TablePiece, Types
from manyhands.data.sources.formats.line_files import line_chunks, line_pieces
from manyhands.data.sources.values.csv_fields import (
    TextColumns,
    checked_encoding,
    text_lines,
    typed_piece,
)
from manyhands.data.sources.values.dates_in_text import TIME

_QUOTED = r'(?:[^"\\]|\\.)*'
_PARTS = (
    ("host", r"^(?P<host>\S+) "),
    ("identity", r"(?P<ident>\S+) "),
    ("user", r"(?P<user>.*?) "),
    ("time", r"\[(?P<time>[^\]]*)\] "),
    ("request", rf'"(?P<request>{_QUOTED})" '),
    ("status", r"(?P<status>[0-9]{3}|-) "),
    ("bytes", r"(?P<bytes>[0-9]+|-)"),
    ("referer or agent", rf'(?: "(?P<referer>{_QUOTED})" "(?P<agent>{_QUOTED})")?\s*$'),
)
_GROUPS = ("host", "ident", "user", "time", "status", "bytes", "referer", "agent")
_LINE = "".join(pattern for _, pattern in _PARTS)
_REQUEST = r"^(?P<method>[A-Za-z][A-Za-z_-]*) (?P<path>.*?)(?: (?P<protocol>[A-Za-z]+/[0-9.]+))?$"
_DEFAULTS = {"time": TIME, "status": pa.int64(), "bytes": pa.int64()}
_COLUMNS = (
    *("host", "ident", "user", "time", "method", "path", "protocol", "status", "bytes"),
    *("referer", "agent"),
)
_NOTHING = pa.scalar(None, pa.string())
_UNKNOWN = pa.array(["", "-"], pa.string())


@dataclass(frozen=True, slots=True)
class AccessLog:
    """Web access logs."""

    urls: tuple[str, ...]
    encoding: str = "utf-8"
    limit: int = MAX_FIELD
    notes: tuple[str, ...] = ()

    @classmethod
    def sniff(
        cls, urls: Sequence[str], *, encoding: str = "utf-8", max_field: int = MAX_FIELD
    ) -> "AccessLog":
        return cls(tuple(urls), checked_encoding(encoding), max_field)

    @staticmethod
    def looks_like(head: bytes) -> bool:
        """Whether most whole lines of a file's beginning are of a log."""
        lines = [line for line in head.decode("utf-8", "replace").split("\n")[:100] if line.strip()]
        lines = lines[:-1] if len(lines) > 1 and not head.endswith(b"\n") else lines
        return bool(lines) and 2 * sum(bool(re.match(_LINE, x)) for x in lines) > len(lines)

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(map(files.shown, self.urls))

    def chunks(self, target_bytes: int) -> list[Chunk]:
        return line_chunks(self.urls, RecordRule(limit=self.limit), target_bytes)

    def read(self, chunk: Chunk, types: Types, target_bytes: int) -> Iterator[TablePiece]:
        url, rule = self.urls[chunk.file], RecordRule(limit=self.limit)
        kinds = {name: types.get(name, _DEFAULTS.get(name, pa.string())) for name in _COLUMNS}
        records = records_of(url, chunk, rule, target_bytes)

        def read(found: FoundRecords, file: str) -> TablePiece:
            return self._piece(found, file, kinds, types)

        return line_pieces(url, records, rule, kinds, read)

    def _piece(self, found: FoundRecords, file: str, kinds: Types, types: Types) -> TablePiece:
        lines = text_lines(found, self.encoding, file)
        texts, rows, bad = lines.columns[0], lines.rows, lines.bad
        fields = pc.extract_regex(texts, pattern=_LINE)
        good = fields.is_valid()
        keep = good.to_numpy(zero_copy_only=False)
        for row in np.flatnonzero(~keep).tolist():
            bad.append(found.bad(file, int(rows[row]), _what_is_wrong(texts[row].as_py())))
        columns = _columns(fields.filter(good))
        return typed_piece(found, TextColumns([], rows[keep], bad), columns, kinds, file, types)


def _columns(fields: pa.Array) -> dict[str, pa.Array]:
    """The parts of lines, as text; null where a part is not known."""
    columns = {name: pc.struct_field(fields, name) for name in _COLUMNS if name in _GROUPS}
    request = pc.struct_field(fields, "request")
    parts = pc.extract_regex(request, pattern=_REQUEST)
    for name in ("method", "path", "protocol"):
        columns[name] = pc.struct_field(parts, name)
    # What is no request of any protocol is kept where it is looked for.
    columns["path"] = pc.if_else(parts.is_valid(), columns["path"], request)
    for name in ("path", "referer", "agent"):
        if pc.any(pc.match_substring(columns[name], "\\")).as_py():
            columns[name] = pc.replace_substring_regex(columns[name], r'\\(["\\])', r"\1")
    return {name: _known(columns[name]) for name in _COLUMNS}


def _known(texts: pa.Array) -> pa.Array:
    return pc.if_else(pc.is_in(texts, value_set=_UNKNOWN), _NOTHING, texts)


def _what_is_wrong(line: str) -> str:
    pattern = ""
    for name, part in _PARTS:
        pattern += part
        if not re.match(pattern, line):
            return f"not in the common or combined log format: its {name} is not"
    return "not in the common or combined log format"
