# SPDX-License-Identifier: Apache-2.0
# pyright: reportAttributeAccessIssue=false
# (the functions of pyarrow.compute are made when it is imported)
"""Plain text: a record is a line, a paragraph, or a window of so many characters.

Lines and paragraphs (which blank lines separate) of nothing but white space are no records. Windows
cut a file's characters without regard to lines; the last one is a record if it has at least two.
The one column is `text`, as it is written, without the end of the line.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from manyhands.data.columns.array_types import Positions
from manyhands.data.sources.access import files
from manyhands.data.sources.cutting.record_boundaries import (
    MAX_FIELD,
    PLAN_BLOCK_BYTES,
    BlockReader,
    FoundRecords,
    RecordRule,
    block_bytes_of,
    blocks_of,
    chunks_of,
    cut,
    records_of,
)
from manyhands.data.sources.cutting.source import Chunk, TablePiece, Types
from manyhands.data.sources.formats import sniffing
from manyhands.data.sources.formats.line_files import line_pieces
from manyhands.data.sources.values.csv_fields import (
    checked_encoding,
    text_lines,
    typed_piece,
)
from manyhands.values.errors import DataError

TextUnit = Literal["line", "paragraph", "window"]

_CHARACTER_BYTES = 4
"""A character of UTF-8 has no more."""


@dataclass(frozen=True, slots=True)
class PlainText:
    """Files of plain text. `sniff` makes one."""

    urls: tuple[str, ...]
    unit: TextUnit = "line"
    window: int = 0
    """How many characters a window has."""
    encoding: str = "utf-8"
    limit: int = MAX_FIELD
    notes: tuple[str, ...] = ()

    @classmethod
    def sniff(
        cls,
        urls: Sequence[str],
        *,
        unit: str = "line",
        window: int | None = None,
        encoding: str = "utf-8",
        max_field: int = MAX_FIELD,
    ) -> "PlainText":
        """`window` alone says what the unit is."""
        encoding = checked_encoding(encoding)
        if unit not in ("line", "paragraph", "window") or (unit == "paragraph" and window):
            raise DataError(f"a unit of text can be line, paragraph or window=N, not '{unit}'.")
        if window is None and unit != "window":
            url, head = sniffing.head_of(urls)
            sniffing.check_line_ends(url, head)
            return cls(tuple(urls), unit, 0, encoding, max_field)
        if window is None or not 2 <= window <= max_field // _CHARACTER_BYTES:
            most = max_field // _CHARACTER_BYTES
            raise DataError(f"a window has 2 to {most:,} characters, not {window}.")
        if encoding != "utf-8" and len(bytes(range(128, 256)).decode(encoding, "replace")) < 128:
            raise DataError(
                f"characters of {encoding} cannot be counted without reading them. Convert the "
                f"file first: iconv -f {encoding} -t utf-8 FILE > NEW"
            )
        return cls(tuple(urls), "window", window, encoding, max_field)

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(map(files.shown, self.urls))

    @property
    def _rule(self) -> RecordRule:
        return RecordRule(paragraphs=self.unit == "paragraph", limit=self.limit)

    def chunks(self, target_bytes: int) -> list[Chunk]:
        return [c for i, url in enumerate(self.urls) for c in self._chunks(i, url, target_bytes)]

    def _chunks(self, file: int, url: str, target_bytes: int) -> list[Chunk]:
        begin = sniffing.begin_of(url)
        if self.unit != "window" or files.compression_of(url):
            return chunks_of(url, file, self._rule, begin, target_bytes)
        size = files.size_of(url)
        windows = self._windows(url, begin, size, 0, PLAN_BLOCK_BYTES)
        return cut(windows, file, begin, size, target_bytes)

    def read(self, chunk: Chunk, types: Types, target_bytes: int) -> Iterator[TablePiece]:
        url, kinds = self.urls[chunk.file], {"text": types.get("text", pa.string())}
        if self.unit == "window":
            block_bytes = block_bytes_of(chunk, target_bytes)
            records = self._windows(url, chunk.start, chunk.stop, chunk.first, block_bytes)
        else:
            records = records_of(url, chunk, self._rule, target_bytes)

        def read(found: FoundRecords, file: str) -> TablePiece:
            lines = text_lines(found, self.encoding, file)
            texts = lines.columns[0]
            columns = {"text": pc.ascii_rtrim_whitespace(texts) if self._rule.paragraphs else texts}
            return typed_piece(found, lines, columns, kinds, file, types)

        return line_pieces(url, records, self._rule, kinds, read)

    def _windows(
        self, url: str, start: int, stop: int, first: int, block_bytes: int
    ) -> Iterator[FoundRecords]:
        read = blocks_of(url, stop, block_bytes)
        name = files.shown(url)
        return find_windows(read, name, self.window, self.encoding == "utf-8", start, first)


def find_windows(
    read: BlockReader, name: str, window: int, utf8: bool, start: int = 0, first: int = 0
) -> Iterator[FoundRecords]:
    """Windows of so many characters from `start`, where one begins, to where `read` ends."""
    rest, at, number = b"", start, first
    for block in read(start):
        data = rest + block
        begins = _characters(data, utf8)[::window]
        if len(begins) > 1:
            last = int(begins[-1])
            yield FoundRecords(data[:last], at, number, begins[:-1], begins[1:])
            data, at, number = data[last:], at + last, number + len(begins) - 1
        rest = data
        if len(rest) > _CHARACTER_BYTES * window:
            raise DataError(
                f"{name} is not in UTF-8: there is none from byte {at:,} on, so characters cannot "
                "be counted. Say what its encoding is."
            )
    if len(rest) > 1 and len(_characters(rest, utf8)) > 1:
        yield FoundRecords(rest, at, number, np.array([0]), np.array([len(rest)]))


def _characters(data: bytes, utf8: bool) -> Positions:
    """Where characters begin; the first byte counts as such a place whatever it is."""
    if not utf8:
        return np.arange(len(data))
    begins = (np.frombuffer(data, np.uint8) & 0xC0) != 0x80
    begins[:1] = True
    return np.flatnonzero(begins)
