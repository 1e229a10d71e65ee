# SPDX-License-Identifier: Apache-2.0
"""What all formats of lines do alike: cut files at records, and read a chunk record by record."""

from collections.abc import Callable, Iterator, Sequence

from manyhands.data.sources.access import files
from manyhands.data.sources.cutting.record_boundaries import (
    FoundRecords,
    RecordRule,
    chunks_of,
)
from manyhands.data.sources.cutting.source import Chunk, TablePiece, Types
from manyhands.data.sources.formats import sniffing
from manyhands.data.sources.values.csv_fields import lost_piece


class UnusualText(Exception):
    """Arrow's reader may read this piece otherwise than we do: it is for the exact way."""


def line_chunks(
    urls: Sequence[str],
    rule: RecordRule,
    target_bytes: int,
    begin_of: Callable[[str], int] = sniffing.begin_of,
) -> list[Chunk]:
    """All files. `begin_of`: where the records of one begin."""
    return [
        chunk
        for number, url in enumerate(urls)
        for chunk in chunks_of(url, number, rule, begin_of(url), target_bytes)
    ]


def line_pieces(
    url: str,
    records: Iterator[FoundRecords],
    rule: RecordRule,
    kinds: Types,
    read: Callable[[FoundRecords, str], TablePiece],
) -> Iterator[TablePiece]:
    """`read` makes a piece of neighbouring records, of a file of this name. What could not be held
    is bad, and makes a piece of `kinds` without rows."""
    file = files.shown(url)
    for found in records:
        yield lost_piece(found, rule, kinds, file) if found.trouble else read(found, file)
