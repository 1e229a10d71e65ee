# SPDX-License-Identifier: Apache-2.0
"""JSON lines: one object a line.

Objects inside become columns `a.b`, lists of numbers stay lists, other lists become JSON text. A
key whose value is always null makes no column. Strings are what they are; where all of a column are
times in ISO 8601, it is a time. Values of different kinds in one column make it text.

Most pieces go through Arrow's reader; those that it finds fault with, or reads otherwise than line
by line, are read one by one. Invariant: both ways give the same table, and records = rows + bad.
Records need not have the same keys: a piece has the columns that its records have, those of the
file's beginning first, in that order, the others by name.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.json as pa_json

from manyhands.data.columns.arrays import whole
from manyhands.data.columns.exact_integers import may_be_rounded
from manyhands.data.sources.access import files
from manyhands.data.sources.cutting.record_boundaries import (
    MAX_FIELD,
    FoundRecords,
    RecordRule,
    records_of,
)
from manyhands.data.sources.cutting.source import Bad, Chunk, TablePiece, Types, form_asked
from manyhands.data.sources.formats import sniffing
from manyhands.data.sources.formats.line_files import UnusualText, line_chunks, line_pieces
from manyhands.data.sources.values.date_order import is_undecided
from manyhands.data.sources.values.dates_in_text import TIME, all_times, are_iso_times, number_times
from manyhands.data.sources.values.json_values import (
    BadRecord,
    array_of,
    fits,
    float_lists,
    is_too_deep,
    kind_of_values,
    leaves,
    record_of,
    text_of,
    without_minus_zero,
)
from manyhands.data.sources.values.text_values import misfit, without_words

_OPEN, _CLOSE = ord("{"), ord("}")
_SPACE = " \t\n\r\v\f"


@dataclass(frozen=True, slots=True)
class JsonLines:
    """Files of JSON lines. `sniff` makes one."""

    urls: tuple[str, ...]
    columns: tuple[str, ...] = ()
    """The columns that the beginning has, in its order."""
    times: tuple[tuple[str, ...], ...] = ()
    """The keys that lead to strings which are times: Arrow's reader is to leave them alone."""
    limit: int = MAX_FIELD
    notes: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    """Words for a missing value."""

    @classmethod
    def sniff(
        cls, urls: Sequence[str], *, max_field: int = MAX_FIELD, missing: Sequence[str] = ()
    ) -> "JsonLines":
        url, head = sniffing.head_of(urls)
        sniffing.check_line_ends(url, head)
        lines = head[sniffing.skip_bom(url, head) :].splitlines()
        if len(lines) > 1 and len(head) >= sniffing.HEAD_BYTES:
            lines.pop()  # it may be cut off
        columns: dict[str, list[Any]] = {}
        paths: dict[str, tuple[str, ...]] = {}
        for line in filter(bytes.strip, lines):
            try:
                for path, value in leaves(record_of(line, 0)):
                    name = ".".join(path)
                    if isinstance(value, str) and value.strip(_SPACE) in missing:
                        continue
                    columns.setdefault(name, []).append(value)
                    paths[name] = path
            except BadRecord:
                continue
        times = tuple(paths[n] for n, values in columns.items() if kind_of_values(values) == TIME)
        return cls(tuple(urls), tuple(columns), times, max_field, missing=tuple(missing))

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(map(files.shown, self.urls))

    def chunks(self, target_bytes: int) -> list[Chunk]:
        return line_chunks(self.urls, RecordRule(limit=self.limit), target_bytes)

    def read(self, chunk: Chunk, types: Types, target_bytes: int) -> Iterator[TablePiece]:
        url = self.urls[chunk.file]
        rule = RecordRule(limit=self.limit)
        records = records_of(url, chunk, rule, target_bytes)

        def read(found: FoundRecords, file: str) -> TablePiece:
            try:
                return self._quickly(found, types)
            except (UnusualText, pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError):
                return self._exactly(found, types, file)

        return line_pieces(url, records, rule, {}, read)

    def _quickly(self, found: FoundRecords, types: Types) -> TablePiece:
        data = np.frombuffer(found.data, np.uint8)
        braced = (data[found.begins] == _OPEN).all() and (data[found.stops - 1] == _CLOSE).all()
        if not braced or not _is_utf8(found.data) or is_too_deep(found):
            raise UnusualText
        table = _parsed(found.data, [pa.field(p[0], _nested(p[1:])) for p in self.times])
        if _has_times(table.schema.types):
            table = _parsed(found.data, [f.with_type(_untimed(f.type)) for f in table.schema])
        if table.num_rows != len(found):
            raise UnusualText
        while any(pa.types.is_struct(kind) for kind in table.schema.types):
            table = table.flatten()
        if len(set(table.column_names)) < table.num_columns:
            raise UnusualText
        columns: dict[str, pa.Array] = {}
        for name in self.ordered(table.column_names):
            column = without_words(whole(table[name]), self.missing)
            if name not in types and may_be_rounded(column):
                raise UnusualText  # whole numbers beyond int64 are floats for Arrow's reader
            if column.null_count < len(column):
                kind = types[name] if name in types else _inferred(column)
                columns[name] = _as(column, kind, form_asked(types, name))
        return TablePiece(_table(columns, len(found)), found.first + np.arange(len(found)))

    def _exactly(self, found: FoundRecords, types: Types, file: str) -> TablePiece:
        columns: dict[str, list[Any]] = {}
        rows: list[int] = []
        bad: list[Bad] = []
        for i in range(len(found)):
            try:
                start = found.start + int(found.begins[i])
                values = _values(found.record(i), start, types, self.missing)
            except BadRecord as error:
                bad.append(found.bad(file, i, str(error)))
                continue
            for name, value in values.items():
                column = columns.setdefault(name, [])
                column += [None] * (len(rows) - len(column))
                column.append(value)
            rows.append(i)
        keep = np.ones(len(rows), dtype=np.bool_)
        made: dict[str, pa.Array] = {}
        for name in self.ordered(columns):
            values = columns[name] + [None] * (len(rows) - len(columns[name]))
            kind = types[name] if name in types else kind_of_values(values)
            form = form_asked(types, name)
            made[name] = array_of(values, kind, form)
            if made[name].null_count > values.count(None):  # a text that is no time
                wrong = [
                    i for i, v in enumerate(values) if v is not None and not made[name][i].is_valid
                ]
                for i in [i for i in wrong if keep[i]]:
                    what = misfit(name, text_of(values[i]), kind, form)
                    bad.append(found.bad(file, rows[i], what))
                keep[wrong] = False
        table = _table(made, len(rows))
        numbers = found.first + np.array(rows, dtype=np.int64)
        if not keep.all():
            table, numbers = table.filter(pa.array(keep)), numbers[keep]
        return TablePiece(table, numbers, sorted(bad, key=lambda b: b.record))

    def ordered(self, names: Iterable[str]) -> list[str]:
        """The order of columns, however many pieces they were found in."""
        place = {name: i for i, name in enumerate(self.columns)}
        return sorted(names, key=lambda name: (place.get(name, len(place)), name))


def _values(raw: bytes, byte: int, types: Types, missing: Sequence[str]) -> dict[str, Any]:
    """The values of a record by column; BadRecord when it has none that could be used."""
    found = [(".".join(path), value) for path, value in leaves(record_of(raw, byte))]
    values = dict(found)
    if len(values) < len(found):
        raise BadRecord("two of its keys make the same column")
    if missing:
        words = {n for n, v in found if isinstance(v, str) and v.strip(_SPACE) in missing}
        values = {name: value for name, value in values.items() if name not in words}
    for name, value in values.items():
        if name in types and not fits(value, types[name]):
            raise BadRecord(misfit(name, text_of(value), types[name]))
    return values


def _table(columns: dict[str, pa.Array], rows: int) -> pa.Table:
    """Also of no columns, with so many rows."""
    if columns:
        return pa.table(columns)
    nothing = pa.StructArray.from_buffers(pa.struct([]), rows, [None])
    return pa.Table.from_batches([pa.RecordBatch.from_struct_array(nothing)])


def _parsed(data: bytes, fields: Sequence[pa.Field]) -> pa.Table:
    schemas = [pa.schema([field]) for field in fields]
    schema = pa.unify_schemas(schemas, promote_options="permissive") if fields else None
    return pa_json.read_json(
        pa.BufferReader(data),
        read_options=pa_json.ReadOptions(use_threads=False, block_size=len(data) + 1),
        parse_options=pa_json.ParseOptions(explicit_schema=schema),
    )


def _is_utf8(data: bytes) -> bool:
    """Arrow's reader does not look."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _nested(path: tuple[str, ...]) -> pa.DataType:
    return pa.struct([pa.field(path[0], _nested(path[1:]))]) if path else pa.string()


def _has_times(kinds: Iterable[pa.DataType]) -> bool:
    return any(
        pa.types.is_timestamp(kind)
        or (pa.types.is_struct(kind) and _has_times(field.type for field in kind))
        for kind in kinds
    )


def _untimed(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_untimed(field.type)) for field in kind])
    return pa.string() if pa.types.is_timestamp(kind) else kind


def _inferred(column: pa.Array) -> pa.DataType:
    timely = pa.types.is_string(column.type) and are_iso_times(column.drop_null())
    return TIME if timely else column.type


def _as(column: pa.Array, kind: pa.DataType, form: str) -> pa.Array:
    """A column of Arrow's reader as `kind`; UnusualText where that needs a closer look."""
    t, here = pa.types, column.type
    text = t.is_string(here)
    number = t.is_integer(here) or t.is_floating(here)
    made = None
    if t.is_timestamp(kind) and (text or number):
        if is_undecided(column, kind, form):
            return column
        made = (all_times(column, form) if text else number_times(column, form)).cast(kind)
    elif t.is_floating(kind) and number:
        made = without_minus_zero(column.cast(pa.float64(), safe=False)).cast(kind, safe=False)
    elif t.is_list(here) and t.is_list(kind) and t.is_floating(kind.value_type):
        made = float_lists(column, kind)
    elif here == kind and _is_ours(kind):
        made = column
    elif t.is_integer(here) and t.is_integer(kind):
        made = column.cast(kind)
    if made is None or made.null_count != column.null_count:
        raise UnusualText
    return made


def _is_ours(kind: pa.DataType) -> bool:
    t = pa.types
    if t.is_list(kind):
        inner = kind.value_type
        return t.is_integer(inner) or t.is_null(inner)
    return t.is_string(kind) or t.is_boolean(kind) or t.is_integer(kind)
