# SPDX-License-Identifier: Apache-2.0
"""What the beginning of a delimited file tells: its delimiter, whether it has a header, its names.

Only the first 256 KB are looked at. What is guessed comes with a note that says so, and every guess
can be overruled by an option.
"""

import codecs
import re
from collections import Counter
from collections.abc import Iterator, Sequence

import pyarrow as pa

from manyhands.data.sources.access import files
from manyhands.data.sources.cutting.record_boundaries import find_records, printable
from manyhands.data.sources.values.csv_fields import Dialect, split
from manyhands.data.sources.values.text_values import NULLS, inferred
from manyhands.values.errors import DataError

HEAD_BYTES = 256 << 10
_MOST_BYTES = 8 << 20
_LINES = 4
_RECORDS = 2000
_CANDIDATES = (",", "\t", ";", "|", "::")
_WORDS = {"tab": "\t", "\\t": "\t", "comma": ",", "semicolon": ";", "pipe": "|", "space": " "}
_BOMS = {codecs.BOM_UTF16_LE: "UTF-16", codecs.BOM_UTF16_BE: "UTF-16"}
_NAMES_SHOWN = 8

TextRows = list[list[str]]


def head_of(urls: Sequence[str]) -> tuple[str, bytes]:
    """The first file that has something in it, and its beginning: some whole lines, if need be
    more than 256 KB."""
    for url in urls:
        size = HEAD_BYTES
        head = files.read_head(url, size)
        while len(head) == size < _MOST_BYTES and head.count(b"\n") < _LINES:
            size *= 4
            head = files.read_head(url, size)
        if head.strip():
            return url, head
    raise DataError(f"there is nothing in {', '.join(map(files.shown, urls[:3]))}.")


def skip_bom(url: str, head: bytes) -> int:
    """How many bytes to leave out at the beginning of a file."""
    for mark, encoding in _BOMS.items():
        if head.startswith(mark):
            raise DataError(
                f"{files.shown(url)} is in {encoding}. Convert it first: "
                f"iconv -f {encoding} -t utf-8 FILE > NEW"
            )
    return len(codecs.BOM_UTF8) if head.startswith(codecs.BOM_UTF8) else 0


def begin_of(url: str) -> int:
    """Where the text of a file begins."""
    return skip_bom(url, files.read_head(url, 4))


def check_line_ends(url: str, head: bytes) -> None:
    if b"\n" not in head and head.count(b"\r") > 1:
        raise DataError(
            f"the lines of {files.shown(url)} end with CR alone, as on old Macs. Convert it first: "
            "tr '\\r' '\\n' < FILE > NEW"
        )


def delimiter_of(word: str) -> str:
    """What people write for a delimiter on a command line."""
    return _WORDS.get(word.lower(), word)


def rows_of(head: bytes, dialect: Dialect) -> TextRows:
    """The first records, without the one that the end of the head cut off."""

    def read(at: int) -> Iterator[bytes]:
        yield head[at:]

    rows: TextRows = []
    for found in find_records(read, dialect.rule):
        if found.trouble:
            break  # what the head cut off looks like a quote that is never closed
        for i in range(min(len(found), _RECORDS - len(rows))):
            text = found.record(i).decode(dialect.encoding, "replace")
            rows.append(split(text, dialect.delimiter, dialect.quote))
    if len(rows) > 2 and not head.endswith(b"\n"):
        rows.pop()
    return [[value.strip() for value in row] for row in rows]


def columns_of(rows: TextRows) -> int:
    """How many columns most records have."""
    counts = Counter(map(len, rows))
    return max(counts, key=lambda n: (counts[n], n)) if counts else 1


def sniff_delimiter(head: bytes, quote: str, encoding: str) -> str:
    """The character that cuts the records most evenly; of several, the one that makes more
    columns."""
    scores: dict[str, tuple[bool, int]] = {}
    rows: dict[str, TextRows] = {}
    for candidate in _CANDIDATES:
        try:
            rows[candidate] = rows_of(head, Dialect(candidate, quote, encoding))
        except DataError:
            continue
        here = rows[candidate]
        columns = columns_of(here)
        even = sum(len(row) == columns for row in here)
        if columns > 1 and even >= 0.8 * len(here):
            scores[candidate] = (len(here[0]) == columns, columns)
    if not scores:
        return ","
    best = max(scores, key=lambda c: scores[c])
    if best == "," and ";" in scores and only_decimal_commas(rows[";"]):
        return ";"
    return best


def only_decimal_commas(rows: TextRows) -> bool:
    """Whether every comma is that of a number such as 1,5."""
    values = [value for row in rows for value in row if "," in value]
    return bool(values) and all(re.fullmatch(r"-?[\d.]*,\d+", value) for value in values)


def has_header(rows: TextRows) -> bool:
    """Whether the first record is the names of the columns.

    Names are no numbers, times or words for missing values. They are taken for names when records
    below are of another kind (numbers under a word), or when they are all there, all different, and
    no column ever has its name as a value. A single column of words has no header.
    """
    columns = columns_of(rows)
    if not rows or len(rows[0]) != columns:
        return False
    names, below = rows[0], [row for row in rows[1:] if len(row) == columns]
    if not any(names) or not all(map(_may_be_name, names)):
        return False
    values: list[tuple[str, ...]] = list(zip(*below, strict=True)) if below else [()] * columns
    if any(_kind(column) not in (pa.string(), pa.null()) for column in values):
        return True
    given = names[1:] if not names[0] else names  # pandas leaves its index unnamed
    if columns == 1 or not all(given) or len(set(given)) < len(given):
        return False
    return not any(name in column for name, column in zip(names, values, strict=True))


def _may_be_name(text: str) -> bool:
    if not text:
        return True
    has_letter, has_digit = any(map(str.isalpha, text)), any(map(str.isdigit, text))
    return text not in NULLS and (has_letter or not has_digit) and _kind([text]) == pa.string()


def _kind(values: Sequence[str]) -> pa.DataType:
    return inferred(pa.array([None if v in NULLS else v for v in values], pa.string()))


def time_columns(names: Sequence[str], rows: TextRows) -> tuple[str, ...]:
    """The columns that hold times, as far as the head tells."""
    good = [row for row in rows if len(row) == len(names)]
    columns = zip(*good, strict=True) if good else ()
    pairs = zip(names, columns, strict=False)
    return tuple(name for name, column in pairs if pa.types.is_timestamp(_kind(column)))


def unique_names(given: Sequence[str]) -> tuple[tuple[str, ...], list[str]]:
    """Names that are all there and all different, and notes on those that had to be made."""
    names: list[str] = []
    taken = set(given)
    notes: list[str] = []
    for i, name in enumerate(given):
        made = name or f"c{i}"
        if made in names or (not name and made in taken):
            made = next(m for k in range(2, len(given) + 3) if (m := f"{made}_{k}") not in taken)
        if made != name:
            taken.add(made)
            told = f"'{name}' is there more than once" if name else "has no name"
            notes.append(f"column {i + 1} {told} and is called '{made}'")
        names.append(made)
    return tuple(names), notes


def listed(names: Sequence[str]) -> str:
    """Some names for people, each cut short and without anything invisible."""
    more = ", ..." if len(names) > _NAMES_SHOWN else ""
    shown = [printable(name.encode("utf-8", "surrogateescape")) for name in names[:_NAMES_SHOWN]]
    return ", ".join(name if len(name) <= 40 else f"{name[:39]}…" for name in shown) + more
