# SPDX-License-Identifier: Apache-2.0
"""Parquet files and Arrow files (IPC file format, also called Feather, and IPC streams).

A record is a row. A chunk of a Parquet file is one row group or several small ones: decoding can
only begin where a group begins, so a huge group is one chunk that is read in many pieces. Chunks of
an Arrow file begin and end at any row of any batch; a stream is one chunk. What cannot be decoded
is a DataError with the file and its row group or batch. The `year=2024` of a path is a column, as
the tools that write such folders mean it.
"""

import itertools
import re
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from manyhands.data.sources.access.files import (
    compression_of,
    local_path,
    open_anywhere,
    shown,
    size_of,
)
from manyhands.data.sources.access.remote_files import said
from manyhands.data.sources.cutting.source import Chunk, TablePiece, Types
from manyhands.data.sources.formats.arrow_ipc_batches import record_batches
from manyhands.data.sources.values.arrow_casting import flattened, piece_of
from manyhands.values.errors import DataError

ColumnarKind = Literal["parquet", "arrow", "stream"]

_ROW_BITS = 40
"""Chunks begin and end at `batch << _ROW_BITS | row`."""
_TO_THE_END = 1 << 62
_END_BYTES = _MAGIC_BYTES = 8
_BATCH_ROWS = 1 << 14
_BUFFER_BYTES = 1 << 20
_HUGE = 4
_PARTITION = re.compile(r"([A-Za-z_]\w*)=(.*)")
_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"


class _RowStretch(NamedTuple):
    """Rows that are read together."""

    start: int
    stop: int
    rows: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Columnar:
    """Files of one of these kinds."""

    urls: tuple[str, ...] = field(repr=False)  # they may hold secrets
    kind: ColumnarKind
    columns: tuple[str, ...] = ()
    """Only these; all when empty."""
    notes: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    """Words for a missing value."""

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(shown(url) for url in self.urls)

    def chunks(self, target_bytes: int) -> list[Chunk]:
        found: list[Chunk] = []
        for number, url in enumerate(self.urls):
            _must_be_bare(url)
            if self.kind == "stream":
                found.append(Chunk(number, 0, _TO_THE_END, 0, size_of(url)))
            else:
                parts = _parquet_parts if self.kind == "parquet" else _file_parts
                found += _joined(number, parts(url, target_bytes), target_bytes)
        return found

    def read(self, chunk: Chunk, types: Types, target_bytes: int) -> Iterator[TablePiece]:
        url = self.urls[chunk.file]
        with _opened(url, mapped=self._is_mapped(url, target_bytes)) as source:
            batches = _BATCHES[self.kind](source, url, chunk, self._top_level(url), target_bytes)
            first = chunk.first
            for table in _gathered(batches, target_bytes):
                numbers = np.arange(first, first + len(table), dtype=np.int64)
                first += len(table)
                table, file = self._whole(table, url), shown(url)
                yield piece_of(table, numbers, file=file, types=types, missing=self.missing)

    def _is_mapped(self, url: str, target_bytes: int) -> bool:
        """A mapped stream stays in memory as far as it was read; one with huge batches has to."""
        if self.kind != "stream" or local_path(url) is None:
            return self.kind == "arrow"
        with _opened(url, mapped=True) as source, _named(url, "its beginning"):
            return any(nbytes > _HUGE * target_bytes for _, nbytes in record_batches(source))

    def _top_level(self, url: str) -> list[str] | None:
        """What has to be read of a file: `a.b` may be a column, or a part of the column `a`."""
        if not self.columns:
            return None
        wanted = [name for name in self.columns if name not in partitions(url)]
        return [".".join(n.split(".")[:i]) for n in wanted for i in range(1, n.count(".") + 2)]

    def _whole(self, table: pa.Table, url: str) -> pa.Table:
        """With the columns that the path names, and of all columns only the wanted ones."""
        table = flattened(table, shown(url))
        for name, value in partitions(url).items():
            if name not in table.column_names:
                values = pa.array([value] * len(table), pa.string())
                table = table.append_column(name, values.cast(self._partition_type(name)))
        if not self.columns:
            return table
        for want in self.columns:
            if not any(_is_part(name, want) for name in table.column_names):
                names = ", ".join(table.column_names)
                raise DataError(f"{shown(url)} has no column '{want}' (looked at: {names}).")
        wanted = [n for n in table.column_names if any(_is_part(n, w) for w in self.columns)]
        return table.select(wanted)

    def _partition_type(self, name: str) -> pa.DataType:
        """Numbers, when all files say so."""
        values = [partitions(url).get(name) for url in self.urls]
        whole = all(v is None or re.fullmatch(r"0|-?[1-9]\d{0,17}", v) for v in values)
        return pa.int64() if whole else pa.string()


def partitions(url: str) -> dict[str, str | None]:
    """What the folders of a path say: `a/year=2024/x.parquet` → year: 2024."""
    found = [_PARTITION.fullmatch(part) for part in shown(url).split("/")[:-1]]
    return {m[1]: None if m[2] == _NO_VALUE else unquote(m[2]) for m in found if m}


def _is_part(name: str, wanted: str) -> bool:
    return name == wanted or name.startswith(f"{wanted}.")


def _must_be_bare(url: str) -> None:
    kind = compression_of(url)
    if kind is not None:
        raise DataError(
            f"{shown(url)} is compressed with {kind} as a whole, and Parquet and Arrow files are "
            "read from their end. Unpack it first (they can be compressed inside instead)."
        )


def _parquet_parts(url: str, target_bytes: int) -> list[_RowStretch]:
    with _opened(url, mapped=False) as source, _named(url, "its end"):
        file = _parquet(source)
        groups = _groups(file)
        if sum(group.num_rows for group in groups) != file.metadata.num_rows:
            raise DataError("the rows of its groups are not those of the file")
    bounds = [_place(i, 0) for i in range(len(groups) + 1)]
    return [
        _RowStretch(start, stop, group.num_rows, group.total_byte_size)
        for (start, stop), group in zip(itertools.pairwise(bounds), groups, strict=True)
    ]


def _file_parts(url: str, target_bytes: int) -> list[_RowStretch]:
    with _opened(url, mapped=True) as source, _named(url, "its end"):
        reader = pa.ipc.open_file(source)
        listed = reader.num_record_batches
        source.seek(_MAGIC_BYTES)
        batches = list(record_batches(source))
        if len(batches) != listed:
            raise DataError(f"it lists {listed:,} record batches, and {len(batches):,} are there")
        for number, (rows, _) in enumerate(batches):
            if not rows:  # nobody reads it, so nobody else would see that it has some
                reader.get_batch(number).validate()
    parts: list[_RowStretch] = []
    for number, (rows, nbytes) in enumerate(batches):
        edges = _edges(rows, nbytes, target_bytes)
        parts += [
            _RowStretch(_place(number, a), _place(number, b), b - a, nbytes // (len(edges) - 1))
            for a, b in itertools.pairwise(edges)
        ]
    return parts


def _place(batch: int, row: int) -> int:
    return batch << _ROW_BITS | row


def _joined(file: int, parts: Sequence[_RowStretch], target_bytes: int) -> list[Chunk]:
    """Neighbours together, up to about `target_bytes`."""
    found: list[Chunk] = []
    start = rows = size = 0
    first = 0
    for part in parts:
        if rows and size + part.nbytes > target_bytes:
            found.append(Chunk(file, start, part.start, first, size))
            start, first, rows, size = part.start, first + rows, 0, 0
        rows, size = rows + part.rows, size + part.nbytes
    if rows:
        found.append(Chunk(file, start, parts[-1].stop, first, size))
    return found


def _edges(rows: int, nbytes: int, target_bytes: int) -> list[int]:
    """Where to cut so many rows to get parts of about `target_bytes`."""
    parts = max(1, min(rows, -(-nbytes // max(1, target_bytes))))
    return [rows * i // parts for i in range(parts + 1)]


def _parquet_batches(
    source: Any, url: str, chunk: Chunk, columns: list[str] | None, target_bytes: int
) -> Iterator[pa.RecordBatch]:
    with _named(url, "its end"):
        file = _parquet(source)
        groups = _groups(file)
        chosen = _chosen(columns, file.schema_arrow)
    for number in range(chunk.start >> _ROW_BITS, chunk.stop >> _ROW_BITS):
        group = groups[number]
        rows = target_bytes * group.num_rows // (group.total_byte_size + 1)
        rows = max(1, min(_BATCH_ROWS, rows))
        seen = 0
        with _named(url, f"row group {number}"):
            for batch in file.iter_batches(rows, [number], columns=chosen, use_threads=False):
                seen += batch.num_rows
                _check(batch)
                yield batch
            if seen != group.num_rows:
                raise DataError(f"it has {seen:,} rows and should have {group.num_rows:,}")


def _file_batches(
    source: Any, url: str, chunk: Chunk, columns: list[str] | None, target_bytes: int
) -> Iterator[pa.RecordBatch]:
    with _named(url, "its end"):
        reader = pa.ipc.open_file(source)
        chosen = _chosen(columns, reader.schema)
    for number in range(chunk.start >> _ROW_BITS, reader.num_record_batches):
        start, stop = max(0, chunk.start - _place(number, 0)), chunk.stop - _place(number, 0)
        if stop <= 0:
            return
        with _named(url, f"record batch {number}"):
            batch = reader.get_batch(number)
            yield from _slices(batch, start, stop, chosen, target_bytes)


def _stream_batches(
    source: Any, url: str, chunk: Chunk, columns: list[str] | None, target_bytes: int
) -> Iterator[pa.RecordBatch]:
    with _named(url, "its beginning"):
        reader = pa.ipc.open_stream(source)
        chosen = _chosen(columns, reader.schema)
    for number in itertools.count():
        with _named(url, f"record batch {number}"):
            try:
                batch = reader.read_next_batch()
            except StopIteration:
                break
            yield from _slices(batch, 0, batch.num_rows, chosen, target_bytes)
    if source.tell() + _END_BYTES < source.size():
        raise DataError(
            f"{shown(url)} has an end mark at byte {source.tell():,} and goes on behind it: it is "
            "damaged, or several streams in one file."
        )


_BATCHES = {"parquet": _parquet_batches, "arrow": _file_batches, "stream": _stream_batches}


def _slices(
    batch: pa.RecordBatch, start: int, stop: int, columns: list[str] | None, target_bytes: int
) -> Iterator[pa.RecordBatch]:
    """The rows [start, stop) in parts that are not too large."""
    batch.validate()
    stop = min(batch.num_rows, stop)
    part = batch.slice(start, stop - start)
    part = part if columns is None else part.select(columns)
    for a, b in itertools.pairwise(_edges(part.num_rows, part.nbytes, target_bytes)):
        one = part.slice(a, b - a)
        _check(one)
        yield one


def _check(batch: pa.RecordBatch) -> None:
    """Refuses arrays that lead outside their memory. Text that is none is found row by row."""
    for column in batch.columns:
        try:
            column.validate(full=True)
        except pa.ArrowInvalid as error:
            if "UTF8" not in str(error) or pa.types.is_nested(column.type):
                raise


def _gathered(batches: Iterator[pa.RecordBatch], target_bytes: int) -> Iterator[pa.Table]:
    """Batches together in tables of about `target_bytes`."""
    held: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        if held and size + batch.nbytes > target_bytes:
            yield pa.Table.from_batches(held)
            held, size = [], 0
        held.append(batch)
        size += batch.nbytes
    if held:
        yield pa.Table.from_batches(held)


def _chosen(columns: list[str] | None, schema: pa.Schema) -> list[str] | None:
    str(schema)  # names that are no text are found here
    return None if columns is None else [name for name in schema.names if name in columns]


def _parquet(source: Any) -> pq.ParquetFile:
    return pq.ParquetFile(
        source, buffer_size=_BUFFER_BYTES, pre_buffer=False, page_checksum_verification=True
    )


def _groups(file: pq.ParquetFile) -> list[Any]:
    return [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]


@contextmanager
def _opened(url: str, mapped: bool) -> Generator[Any]:
    """Local Arrow files are mapped: a huge batch costs memory only where it is read."""
    path = local_path(url)
    if path is None:
        with open_anywhere(url) as file:
            yield pa.PythonFile(file, mode="r")
        return
    with _named(url, "its beginning"):
        source = pa.memory_map(path) if mapped else pa.OSFile(path)
    with source:
        yield source


@contextmanager
def _named(url: str, where: str) -> Generator[None]:
    try:
        yield
    except DataError as error:
        if shown(url) in str(error):
            raise
        raise DataError(f"{shown(url)}, {where}: {error}") from None
    except Exception as error:  # Arrow's own, and whatever a storage library raises
        raise DataError(
            f"{shown(url)} is damaged or not of this format; {where} cannot be read: "
            f"{said(error, url)}"
        ) from None
