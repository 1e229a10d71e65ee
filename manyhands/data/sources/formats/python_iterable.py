# SPDX-License-Identifier: Apache-2.0
"""Records that Python code makes: any iterable, read once and kept as Arrow files.

A record is a dict, a named tuple or a dataclass, a tuple when names are given, or one array or
tensor (column `x`) or text (column `text`). The first record says which columns there are. Arrays
of any shape are stored flat.

Invariant: the n-th record that the iterable gives is record n, wherever the files are cut; it is a
row or a Bad. `digest` is that of all files: it tells whether the same code gave the same again.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
import pyarrow as pa
import xxhash

from manyhands.data.sources.cutting.source import Bad, Chunk, TablePiece, Types
from manyhands.data.sources.formats.python_rows import (
    PythonRow,
    as_row,
    described,
    size_of_row,
    table_of,
)
from manyhands.data.sources.values.arrow_casting import piece_of
from manyhands.values.errors import DataError, DataTaskFailed
from manyhands.values.user_frames import user_traceback

NAME = "generator"
_BATCH_ROWS = 1024
_BATCH_BYTES = 4 << 20
_SPACE = " \t\n\r\v\f"


class SpooledFile(msgspec.Struct, frozen=True):
    """A file of the folder; its last column has the records' numbers."""

    file: str
    first: int
    nbytes: int
    bad: list[Bad]


@dataclass(frozen=True, slots=True)
class Spooled:
    """What an iterable gave."""

    folder: str
    parts: tuple[SpooledFile, ...]
    digest: str
    notes: tuple[str, ...] = ()

    @property
    def files(self) -> tuple[str, ...]:
        return (NAME,)

    def chunks(self, target_bytes: int) -> list[Chunk]:
        return [Chunk(0, i, i + 1, part.first, part.nbytes) for i, part in enumerate(self.parts)]

    def read(self, chunk: Chunk, types: Types, target_bytes: int) -> Iterator[TablePiece]:
        for part in self.parts[chunk.start : chunk.stop]:
            with pa.memory_map(str(Path(self.folder) / part.file)) as source:
                table = pa.ipc.open_file(source).read_all()
                last = table.num_columns - 1
                numbers, table = table.column(last).to_numpy(), table.remove_column(last)
                yield piece_of(table, numbers, file=NAME, types=types, bad=part.bad)


def spool(
    records: Iterable[object],
    folder: str | Path,
    target_bytes: int,
    names: Sequence[str] | None = None,
    missing: Sequence[str] = (),
) -> Spooled:
    """All records, written to Arrow files of about `target_bytes` in `folder`. Text that is one of
    `missing` is no value: numbers beside it stay numbers."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    writer = _SpoolWriter(path, target_bytes, frozenset(missing))
    for number, record in enumerate(_given(records)):
        writer.add(number, record, names)
    return writer.finished()


def _given(records: Iterable[object]) -> Iterator[object]:
    number = 0
    try:
        for record in records:
            yield record
            number += 1
    except DataError:
        raise
    except Exception as error:
        raise DataTaskFailed(
            f"the generator failed at record {number + 1:,}.\n{user_traceback(error)}"
        ) from error


class _SpoolWriter:
    """Collects records in batches and batches in files; it holds one file and one batch."""

    def __init__(self, folder: Path, target_bytes: int, missing: frozenset[str]) -> None:
        self._folder, self._target, self._missing = folder, target_bytes, missing
        self._columns: list[str] = []
        self._rows: list[PythonRow] = []
        self._numbers: list[int] = []
        self._size = 0
        self._tables: list[pa.Table] = []
        self._bad: list[Bad] = []
        self._parts: list[SpooledFile] = []
        self._seen = self._first = 0
        self._digest = xxhash.xxh3_64()

    def add(self, number: int, record: object, names: Sequence[str] | None) -> None:
        self._seen = number + 1
        try:
            row = as_row(record, names, self._columns)
        except ValueError as error:
            if not self._columns:
                raise DataError(f"record {number + 1} of the generator {error}.") from None
            self._bad.append(Bad(NAME, number, -1, str(error), described(record)))
            return
        self._columns = self._columns or list(row)
        self._rows.append({name: self._known(value) for name, value in row.items()})
        self._numbers.append(number)
        self._size += size_of_row(row)
        if len(self._rows) == _BATCH_ROWS or self._size > min(_BATCH_BYTES, self._target):
            self._close_batch()

    def _known(self, value: object) -> object:
        """None for a word that means nothing, in dicts within dicts too: these become columns."""
        if isinstance(value, dict):
            inner = cast(dict[object, object], value)
            return {name: self._known(within) for name, within in inner.items()}
        is_word = isinstance(value, str) and value.strip(_SPACE) in self._missing
        return None if is_word else value

    def _close_batch(self) -> None:
        table, wrong = table_of(self._rows, self._columns)
        numbers = np.array(self._numbers, dtype=np.int64)
        bad = [Bad(NAME, int(numbers[row]), -1, what) for row, what in wrong.items()]
        self._bad = sorted([*self._bad, *bad], key=lambda b: b.record)
        table = table.append_column("", pa.array(np.delete(numbers, list(wrong)), pa.int64()))
        held = sum(t.nbytes for t in self._tables)
        if self._tables and (held + table.nbytes > self._target or not self._joins(table)):
            self._close_file(int(numbers[0]))
        self._tables.append(table)
        self._rows, self._numbers, self._size = [], [], 0

    def _joins(self, table: pa.Table) -> bool:
        """Whether the batch has the types of those before it, but for columns without values."""
        try:
            pa.unify_schemas([self._tables[0].schema, table.schema])
        except (pa.ArrowInvalid, pa.ArrowTypeError):
            return False
        return True

    def _close_file(self, stop: int) -> None:
        """Everything before record `stop` is in this file or one before it."""
        table = pa.concat_tables(self._tables, promote_options="default")
        name = f"{len(self._parts):06}.arrow"
        path = str(self._folder / name)
        with pa.OSFile(path, "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        with open(path, "rb") as file:
            while block := file.read(_BATCH_BYTES):
                self._digest.update(block)
        mine = [bad for bad in self._bad if bad.record < stop]
        self._bad = self._bad[len(mine) :]
        self._parts.append(SpooledFile(name, self._first, table.nbytes, mine))
        self._first, self._tables = stop, []

    def finished(self) -> Spooled:
        if not self._seen:
            raise DataError("the generator gave no records.")
        if self._rows:
            self._close_batch()
        self._close_file(self._seen)
        digest = self._digest.hexdigest()
        return Spooled(str(self._folder), tuple(self._parts), digest)
