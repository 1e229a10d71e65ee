# SPDX-License-Identifier: Apache-2.0
"""Files of delimited records: CSV, TSV and their relatives.

Most pieces go straight through Arrow's reader, typed on the way. Where it finds fault, or where
something could be read in two ways, the piece is read as text, exactly, and every record that is
bad is named. Invariant: both ways give the same table, and records = rows + bad.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from manyhands.data.columns.arrays import whole
from manyhands.data.columns.exact_integers import may_be_rounded
from manyhands.data.sources.access import files
from manyhands.data.sources.cutting.record_boundaries import (
    MAX_FIELD,
    TO_THE_END,
    FoundRecords,
    blocks_of,
    find_records,
    records_of,
)
from manyhands.data.sources.cutting.source import Chunk, TablePiece, Types
from manyhands.data.sources.formats import sniffing
from manyhands.data.sources.formats.line_files import UnusualText, line_chunks, line_pieces
from manyhands.data.sources.values.csv_fields import (
    Dialect,
    TextColumns,
    checked_encoding,
    decoded,
    has_hexadecimals,
    is_usual,
    lost,
    parsed,
    split,
    text_columns,
    typed_piece,
)
from manyhands.data.sources.values.text_values import cleaned, inferred, nulls_of
from manyhands.values.errors import DataError


@dataclass(frozen=True, slots=True)
class Delimited:
    """Delimited files that are written alike. `sniff` makes one."""

    urls: tuple[str, ...]
    dialect: Dialect
    names: tuple[str, ...]
    header: tuple[str, ...] = ()
    """The first record of every file, where it is no record; empty where all are."""
    null: tuple[str, ...] = ()
    """What stands for a missing value, beside the usual."""
    times: tuple[str, ...] = ()
    """Columns that seem to hold times: those are read as text at once."""
    notes: tuple[str, ...] = ()
    """What was guessed, for people."""

    @classmethod
    def sniff(
        cls,
        urls: Sequence[str],
        *,
        delimiter: str | None = None,
        header: bool | str | None = "auto",
        names: Sequence[str] = (),
        quote: str = '"',
        encoding: str = "utf-8",
        null: Sequence[str] = (),
        max_field: int = MAX_FIELD,
    ) -> "Delimited":
        """The first file's beginning decides what the options leave open."""
        url, head = sniffing.head_of(urls)
        sniffing.check_line_ends(url, head)
        head = head[sniffing.skip_bom(url, head) :]
        checked_encoding(encoding)
        if delimiter is not None:
            delimiter = sniffing.delimiter_of(delimiter)
        elif files.suffix_of(url) in (".tsv", ".tab"):
            delimiter = "\t"
        else:
            delimiter = sniffing.sniff_delimiter(head, quote, encoding)
        dialect = Dialect(delimiter, quote, encoding, max_field)
        rows = sniffing.rows_of(head, dialect)
        notes: list[str] = []
        with_header = _wanted(header, rows, names, notes)
        first = tuple(rows[0]) if with_header else ()
        columns = len(first) or sniffing.columns_of(rows)
        if names and len(names) != columns:
            raise DataError(
                f"{len(names)} names are given, but {files.shown(url)} has {columns} columns "
                f"between its {delimiter!r}."
            )
        unnamed = [f"c{i}" for i in range(columns)]
        made, renamed = sniffing.unique_names(tuple(names) or first or unnamed)
        times = sniffing.time_columns(made, rows[1:] if with_header else rows)
        if delimiter != "," and sniffing.only_decimal_commas(rows):
            notes.append("numbers with a decimal comma (1,5) are read as text")
        all_notes = (*notes, *renamed)
        return cls(tuple(urls), dialect, made, first, tuple(null), times, all_notes)

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(map(files.shown, self.urls))

    def chunks(self, target_bytes: int) -> list[Chunk]:
        return line_chunks(self.urls, self.dialect.rule, target_bytes, self._begin)

    def read(self, chunk: Chunk, types: Types, target_bytes: int) -> Iterator[TablePiece]:
        url, rule = self.urls[chunk.file], self.dialect.rule
        records = records_of(url, chunk, rule, target_bytes)
        kinds = {name: types.get(name, pa.null()) for name in self.names}

        def read(found: FoundRecords, file: str) -> TablePiece:
            return self._piece(found, types, file)

        return line_pieces(url, records, rule, kinds, read)

    def _begin(self, url: str) -> int:
        """Where the records begin: behind a byte order mark and the header."""
        begin = sniffing.begin_of(url)
        if not self.header:
            return begin
        read = blocks_of(url, TO_THE_END, sniffing.HEAD_BYTES)
        found = next(find_records(read, self.dialect.rule, begin), None)
        if found is None:
            return begin
        text, what = decoded(found.record(0), begin, self.dialect.encoding)
        what = what or lost(found, self.dialect.rule)
        if text is None or what:
            raise DataError(f"the header of {files.shown(url)} cannot be read: {what}.")
        fields = split(text, self.dialect.delimiter, self.dialect.quote)
        here = tuple(field.strip() for field in fields)
        if here != self.header:
            raise DataError(
                f"{files.shown(url)} begins with {sniffing.listed(here)}; its header should be "
                f"that of the first file: {sniffing.listed(self.header)}. Prepare files of "
                "different columns by themselves, or say that there is no header."
            )
        return found.start + int(found.begins[1] if len(found) > 1 else len(found.data))

    def _piece(self, found: FoundRecords, types: Types, file: str) -> TablePiece:
        try:
            return self._quickly(found, types, file)
        except (UnusualText, pa.ArrowInvalid, UnicodeError):
            return self._exactly(found, types, file)

    def _quickly(self, found: FoundRecords, types: Types, file: str) -> TablePiece:
        """Typed by Arrow's reader where it and we agree on what a value is."""
        if not is_usual(found.data, self.dialect) or has_hexadecimals(found.data):
            raise UnusualText
        nulls = nulls_of(self.null)
        words: list[str] = nulls.to_pylist()
        kinds = {name: _readable(types[name]) for name in self.names if name in types}
        kinds |= {name: pa.string() for name in self.times if name not in kinds}
        padded = [*words, *(f" {word}" for word in words)]
        table = parsed(found.data, self.dialect, self.names, kinds, padded)
        of_time = [f.name for f in table.schema if pa.types.is_temporal(f.type)]
        if of_time:  # our times have more forms than its
            kinds |= dict.fromkeys(of_time, pa.string())
            table = parsed(found.data, self.dialect, self.names, kinds, padded)
        if table.num_rows != len(found) or pa.binary() in table.schema.types:  # not in UTF-8
            raise UnusualText
        columns = [whole(table[name]) for name in self.names]
        guessed = zip(self.names, columns, strict=True)
        if any(may_be_rounded(column) for name, column in guessed if name not in kinds):
            raise UnusualText  # whole numbers beyond int64 are floats for Arrow's reader
        return self._typed(found, TextColumns(columns, np.arange(len(found))), types, file)

    def _exactly(self, found: FoundRecords, types: Types, file: str) -> TablePiece:
        return self._typed(found, text_columns(found, self.dialect, self.names, file), types, file)

    def _typed(
        self, found: FoundRecords, texts: TextColumns, types: Types, file: str
    ) -> TablePiece:
        """Columns that are still text as what they are."""
        nulls = nulls_of(self.null)
        columns = dict(zip(self.names, texts.columns, strict=True))
        kinds: dict[str, pa.DataType] = {}
        for name, column in columns.items():
            if pa.types.is_string(column.type):
                columns[name] = cleaned(column, nulls)
                kinds[name] = types[name] if name in types else inferred(columns[name])
        return typed_piece(found, texts, columns, kinds, file, types)


def _wanted(
    header: bool | str | None, rows: sniffing.TextRows, names: Sequence[str], notes: list[str]
) -> bool:
    """Whether the first record is a header; a guess is noted."""
    if header in (True, "yes"):
        return bool(rows)
    if header in (False, "no"):
        return False
    if header not in (None, "auto"):
        raise DataError(f"header can be yes, no or auto, not '{header}'.")
    if names and rows and tuple(rows[0]) == tuple(names):
        return True
    found = sniffing.has_header(rows)
    if found:
        shown = sniffing.listed(rows[0])
        notes.append(f"the first line is taken for column names ({shown}); if not: --header no")
    else:
        notes.append("the first line is taken for a record; if not: --header yes")
    return found


def _readable(kind: pa.DataType) -> pa.DataType:
    """What Arrow's reader is asked for: text, where our idea of the type is wider than its."""
    t = pa.types
    return kind if t.is_integer(kind) or t.is_floating(kind) or t.is_null(kind) else pa.string()
