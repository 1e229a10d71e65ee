# SPDX-License-Identifier: Apache-2.0
"""The rows of files as records for `map_reduce`: dicts of plain values.

Files are parsed once, as for a preparation, so that a column has one type in all of them; a bad
record is named and ends it. Moments come as text, 2024-01-31 23:59:59.000000, which sorts by time.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from manyhands.data.columns.schema import ID, RECORD_BITS
from manyhands.data.mapreduce.resumable_tasks import TaskRunner, digest_of
from manyhands.data.mapreduce.stage_sources import stage_sources
from manyhands.data.sources.open_sources import Options, open_sources
from manyhands.data.sources.staging import read_piece

AT_ONCE = 1024
"""Rows that are made at a time."""


class FileRows(msgspec.Struct, frozen=True):
    """A piece of a file, as it was staged."""

    piece: str
    file: str
    """What it was read from."""
    types: dict[str, str]
    nbytes: int
    key: str
    """Of the file as it was."""

    def records(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Each row, and what to call it."""
        table = _readable(read_piece(Path(self.piece), self.types))
        numbers = table.column(ID).to_numpy() & ((1 << RECORD_BITS) - 1)
        table = table.drop_columns([ID])
        for start in range(0, table.num_rows, AT_ONCE):
            for i, row in enumerate(table.slice(start, AT_ONCE).to_pylist()):
                yield f"{self.file}, record {numbers[start + i] + 1:,}", row


def _readable(table: pa.Table) -> pa.Table:
    for i, field in enumerate(table.schema):
        if pa.types.is_timestamp(field.type):
            table = table.set_column(i, field.name, table.column(i).cast(pa.string()))
    return table


def stage_rows(runner: TaskRunner, files: Sequence[str], target_bytes: int) -> list[FileRows]:
    """All rows of these files, in order, in pieces of about this size."""
    sources = open_sources(files, Options(), spool=runner.folder / "spool", target=target_bytes)
    names = [file for source in sources for file in source.files]
    key = digest_of(*map(_as_it_is, names), target_bytes)
    folder = runner.folder / "pieces"
    staged = stage_sources(runner, sources, {}, target_bytes, folder, key=key)
    return [
        FileRows(str(folder / piece.file), file, staged.types, piece.nbytes, key)
        for one, file in zip(staged.stages, staged.files, strict=True)
        for piece in one.pieces
    ]


def _as_it_is(file: str) -> str:
    path = Path(file)
    if not path.is_file():
        return file
    known = path.stat()
    return f"{file} {known.st_size} {known.st_mtime_ns}"
