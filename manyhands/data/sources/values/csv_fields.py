# SPDX-License-Identifier: Apache-2.0
"""Delimited records as columns of text: quickly, or exactly where something is unusual.

`parsed` is Arrow's reader. `text_columns` never fails: where Arrow's reader finds fault with some
records, they are cut smaller and smaller until the few that are bad are read one by one and named.
Invariant: what both can read, both read alike; records = rows + bad.
"""

import codecs
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
from numpy.typing import NDArray

from manyhands.data.columns.arrays import whole
from manyhands.data.sources.cutting.record_boundaries import MAX_FIELD, FoundRecords, RecordRule
from manyhands.data.sources.cutting.source import Bad, TablePiece, Types, form_asked
from manyhands.data.sources.values.text_values import FALSE, TRUE, converted, misfit
from manyhands.values.errors import DataError

_SEPARATOR = b"\x1f"
"""Takes the place of a delimiter of several characters, which Arrow's reader does not know."""
_FEW = 256
_CACHED = 256 << 10


@dataclass(frozen=True, slots=True)
class Dialect:
    """How records are written."""

    delimiter: str = ","
    """One or more characters; with more than one there is no quoting."""
    quote: str = '"'
    encoding: str = "utf-8"
    limit: int = MAX_FIELD
    """Records of more bytes are bad."""

    def __post_init__(self) -> None:
        if not self.delimiter or set(self.delimiter) & {"\n", "\r", "\0", self.quote}:
            raise DataError(f"the delimiter cannot be {self.delimiter!r}.")
        if len(self.quote.encode()) > 1 or self.quote in ("\n", "\r", "\0"):
            raise DataError(f"the quote cannot be {self.quote!r}: use one ASCII character or none.")
        if self.is_long:
            object.__setattr__(self, "quote", "")
        object.__setattr__(self, "encoding", checked_encoding(self.encoding, self.delimiter))

    @property
    def is_long(self) -> bool:
        """Whether the delimiter is more than one byte."""
        return len(self.delimiter.encode()) > 1

    @property
    def rule(self) -> RecordRule:
        space = bytes(c for c in b" \t\r\v\f" if chr(c) not in self.delimiter)
        delimiter = self.delimiter.encode() if self.quote else b""
        return RecordRule(delimiter, self.quote.encode(), space, limit=self.limit)


def checked_encoding(encoding: str, delimiter: str = "\n") -> str:
    """Its usual name. Lines and fields are found in the bytes, so ASCII must be itself there."""
    every = bytes(range(128))
    try:
        name = codecs.lookup(encoding).name.removesuffix("-sig")
        plain = every.decode(name) == every.decode("ascii")
    except LookupError:
        raise DataError(f"there is no encoding '{encoding}'; try utf-8 or latin-1.") from None
    except UnicodeError:
        plain, name = False, encoding
    # In some encodings an ASCII byte may be the second half of a character.
    halves = [bytes([lead, ord(delimiter[0]) & 127]) for lead in range(128, 256)]
    if not plain or any(_is_one(half, name) for half in halves):
        raise DataError(
            f"a file in the encoding '{encoding}' cannot be cut at {delimiter!r}. Convert it "
            f"first: iconv -f {encoding} -t utf-8 FILE > NEW"
        )
    return name


def _is_one(half: bytes, encoding: str) -> bool:
    try:
        return len(half.decode(encoding)) == 1
    except UnicodeDecodeError:
        return False


@dataclass(slots=True)
class TextColumns:
    """The good records of some as columns of text, and the bad ones."""

    columns: list[pa.Array]
    rows: NDArray[np.int64]
    """Which of the records each row is."""
    bad: list[Bad] = field(default_factory=list[Bad])


def is_usual(data: bytes, dialect: Dialect) -> bool:
    """Whether Arrow's reader sees the same records as we do."""
    if b"\0" in data or (dialect.is_long and _SEPARATOR in data):
        return False
    return b"\r" not in data or data.count(b"\r") == data.count(b"\r\n")


def has_hexadecimals(data: bytes) -> bool:
    """0x10 is a number for Arrow's reader, unless another value of the column has a point."""
    if b"x" not in data and b"X" not in data:
        return False
    array = np.frombuffer(data, np.uint8)
    parts = (array[at : at + _CACHED + 1] for at in range(0, len(array), _CACHED))
    return any((((p[1:] | 0x20) == ord("x")) & (p[:-1] == ord("0"))).any() for p in parts)


def parsed(
    data: bytes,
    dialect: Dialect,
    names: Sequence[str],
    types: Mapping[str, pa.DataType],
    nulls: Sequence[str] = (),
) -> pa.Table:
    """By Arrow's reader; ArrowInvalid or UnicodeError where it finds fault."""
    if dialect.encoding != "utf-8":
        data = data.decode(dialect.encoding).encode()
    delimiter = dialect.delimiter
    if dialect.is_long:
        data, delimiter = data.replace(delimiter.encode(), _SEPARATOR), _SEPARATOR.decode()
    quoted = bool(dialect.quote) and dialect.quote.encode() in data
    return pa_csv.read_csv(
        pa.BufferReader(data),
        read_options=pa_csv.ReadOptions(
            use_threads=False, block_size=len(data) + 1, column_names=list(names)
        ),
        parse_options=pa_csv.ParseOptions(
            delimiter=delimiter,
            quote_char=dialect.quote if quoted else False,
            newlines_in_values=quoted,
        ),
        convert_options=pa_csv.ConvertOptions(
            column_types=dict(types),
            null_values=list(nulls),
            true_values=list(TRUE),
            false_values=list(FALSE),
            strings_can_be_null=False,
        ),
    )


def text_columns(
    found: FoundRecords, dialect: Dialect, names: Sequence[str], file: str
) -> TextColumns:
    """All records that have the right columns, as they are written."""
    types = {name: pa.string() for name in names}
    parts: list[TextColumns] = []

    def visit(i: int, j: int) -> None:
        data = found.span(i, j)
        try:
            table = parsed(data, dialect, names, types) if is_usual(data, dialect) else None
        except (pa.ArrowInvalid, UnicodeError):
            table = None
        if table is not None and table.num_rows == j - i:
            parts.append(TextColumns([whole(c) for c in table.columns], np.arange(i, j)))
        elif j - i <= _FEW:
            parts.append(_one_by_one(found, range(i, j), dialect, len(names), file))
        else:
            step = -(-(j - i) // 16)
            for k in range(i, j, step):
                visit(k, min(j, k + step))

    visit(0, len(found))
    columns = [pa.concat_arrays(arrays) for arrays in zip(*(p.columns for p in parts), strict=True)]
    rows = np.concatenate([p.rows for p in parts])
    return TextColumns(columns, rows, [bad for p in parts for bad in p.bad])


def _one_by_one(
    found: FoundRecords, records: range, dialect: Dialect, columns: int, file: str
) -> TextColumns:
    good: list[list[str]] = []
    rows: list[int] = []
    bad: list[Bad] = []
    for i in records:
        raw = found.record(i)
        text = decoded(raw, found.start + int(found.begins[i]), dialect.encoding)
        fields = split(text[0], dialect.delimiter, dialect.quote) if text[0] is not None else []
        if text[0] is None:
            bad.append(found.bad(file, i, text[1]))
        elif len(fields) != columns:
            counted = f"{len(fields):,} column{'s'[: len(fields) != 1]}"
            bad.append(found.bad(file, i, f"{counted}, expected {columns:,}"))
        else:
            good.append(fields)
            rows.append(i)
    values = zip(*good, strict=True) if good else [()] * columns
    arrays = [pa.array(column, pa.string()) for column in values]
    return TextColumns(arrays, np.array(rows, dtype=np.int64), bad)


def text_lines(found: FoundRecords, encoding: str, file: str) -> TextColumns:
    """Records of one field, as they are written."""
    places = zip(found.begins.tolist(), found.stops.tolist(), strict=True)
    raws = [found.data[begin:stop] for begin, stop in places]
    rows = np.arange(len(found))
    try:
        if b"\0" not in found.data:
            texts = raws if encoding == "utf-8" else [raw.decode(encoding) for raw in raws]
            return TextColumns([pa.array(texts, pa.string())], rows)
    except (pa.ArrowInvalid, UnicodeError):
        pass
    bad: list[Bad] = []
    good: list[str | None] = []
    for i, raw in enumerate(raws):
        text, what = decoded(raw, found.start + int(found.begins[i]), encoding)
        good.append(text)
        if text is None:
            bad.append(found.bad(file, i, what))
    array = pa.array(good, pa.string())
    keep = array.is_valid()
    return TextColumns([array.filter(keep)], rows[keep.to_numpy(zero_copy_only=False)], bad)


def typed_piece(
    found: FoundRecords,
    texts: TextColumns,
    columns: dict[str, pa.Array],
    kinds: Types,
    file: str,
    asked: Types,
) -> TablePiece:
    """The columns, those in `kinds` made of clean text; records with a wrong value are bad."""
    rows, bad = texts.rows, list(texts.bad)
    keep = np.ones(len(rows), dtype=np.bool_)
    for name, kind in kinds.items():
        column = columns[name]
        form = form_asked(asked, name)
        columns[name], wrong = converted(column, kind, form)
        for row in np.flatnonzero(wrong & keep).tolist():
            what = misfit(name, column[row].as_py(), kind, form)
            bad.append(found.bad(file, int(rows[row]), what))
        keep &= ~wrong
    table = pa.table(columns)
    if not keep.all():
        table, rows = table.filter(pa.array(keep)), rows[keep]
    return TablePiece(table, found.first + rows, sorted(bad, key=lambda b: b.record))


def lost_piece(found: FoundRecords, rule: RecordRule, kinds: Types, file: str) -> TablePiece:
    """A record that could not be held, and no rows."""
    table = pa.table({name: pa.nulls(0, kind) for name, kind in kinds.items()})
    return TablePiece(table, np.empty(0, np.int64), [found.bad(file, 0, lost(found, rule))])


def lost(found: FoundRecords, rule: RecordRule) -> str:
    """Why a record could not be held; empty where it could."""
    match found.trouble:
        case "quote":
            return f"a quote ({rule.quote.decode()}) is opened and never closed"
        case "too long":
            return f"longer than max_field ({rule.limit:,} bytes)"
        case _:
            return ""


def decoded(raw: bytes, start: int, encoding: str) -> tuple[str | None, str]:
    """The text of a record, or what is wrong with it."""
    nul = raw.find(b"\0")
    if nul >= 0:
        return None, f"a NUL at byte {start + nul:,}"
    try:
        return raw.decode(encoding), ""
    except UnicodeDecodeError as error:
        at = f"byte 0x{raw[error.start]:02x} at {start + error.start:,}"
        hint = "; perhaps encoding=latin-1" if encoding == "utf-8" else ""
        return None, f"not {encoding}: {at}{hint}"


def split(text: str, delimiter: str, quote: str) -> list[str]:
    """The fields of one record whose quotes are all closed."""
    if not quote or quote not in text:
        return text.split(delimiter)
    fields: list[str] = []
    at = 0
    while True:
        parts: list[str] = []
        if text.startswith(quote, at):
            at = _quoted(text, quote, at + 1, parts.append)
        stop = text.find(delimiter, at)
        stop = len(text) if stop < 0 else stop
        parts.append(text[at:stop])  # what follows a closing quote belongs to the field
        fields.append("".join(parts))
        if stop == len(text):
            return fields
        at = stop + len(delimiter)


def _quoted(text: str, quote: str, at: int, add: Callable[[str], None]) -> int:
    """Where the quotes that were opened before `at` are closed; `add` gets what is inside."""
    while True:
        stop = text.find(quote, at)
        stop = len(text) if stop < 0 else stop
        add(text[at:stop])
        if not text.startswith(quote, stop + 1):
            return stop + 1
        add(quote)
        at = stop + 2
