# SPDX-License-Identifier: Apache-2.0
"""A file of predictions that appears whole: rows are written as they come, to a draft beside it.

The suffix says the format: parquet, csv, jsonl, arrow. Lists are lists where there are any; in CSV
each place of a list is a column. Whatever goes wrong, the draft is gone and a file that was there
before is as it was.
"""

import glob
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import msgspec
import pyarrow as pa
from pyarrow import csv, parquet

from manyhands.values.errors import DataError, RequestError
from manyhands.values.run_folder import naming, sync_folder

Sink = Any
"""An open file of Arrow's."""


_UNEVEN = (
    "the model gives more numbers for some records than for others: write parquet or jsonl, where "
    "they are lists."
)


class TableSink(Protocol):
    def write_table(self, table: pa.Table) -> None: ...
    def close(self) -> None: ...


class _CsvTables:
    def __init__(self, sink: Sink, schema: pa.Schema) -> None:
        self._writer = csv.CSVWriter(sink, schema)

    def write_table(self, table: pa.Table) -> None:
        self._writer.write_table(table)

    def close(self) -> None:
        self._writer.close()


class _JsonTables:
    def __init__(self, sink: Sink, schema: pa.Schema) -> None:
        self._sink, self._encode = sink, msgspec.json.Encoder(enc_hook=str).encode

    def write_table(self, table: pa.Table) -> None:
        for batch in table.to_batches(max_chunksize=4096):
            lines = [self._encode(row) for row in batch.to_pylist()]
            self._sink.write(b"\n".join([*lines, b""]))

    def close(self) -> None:
        pass


def _parquet(sink: Sink, schema: pa.Schema) -> TableSink:
    """Dictionaries are for names: those of probabilities would take longer than the model."""
    names: Any = [field.name for field in schema if pa.types.is_string(field.type)]
    return parquet.ParquetWriter(sink, schema, use_dictionary=names)


def _arrow(sink: Sink, schema: pa.Schema) -> TableSink:
    return pa.ipc.new_file(sink, schema)


FORMATS: dict[str, Callable[[Sink, pa.Schema], TableSink]] = {
    ".parquet": _parquet,
    ".csv": _CsvTables,
    ".jsonl": _JsonTables,
    ".arrow": _arrow,
}


def refuse_target(to: Path) -> None:
    """Better said before an hour of work than after it."""
    if to.suffix.lower() not in FORMATS:
        raise RequestError(f"--to {to}: give a file that ends in {', '.join(FORMATS)}.")
    if to.is_dir():
        raise RequestError(f"--to {to} is a folder; give a file.")
    if not to.absolute().parent.is_dir():
        raise RequestError(f"--to {to}: there is no folder {to.absolute().parent}.")


class PredictionFile:
    """Tables in order. Their columns are known with the first that has predictions: those before
    it, in which all records are bad, wait for it."""

    def __init__(self, to: Path, sink: Sink) -> None:
        self._to, self._make, self._sink = to, FORMATS[to.suffix.lower()], sink
        self._flat = to.suffix.lower() == ".csv"
        self._schema: pa.Schema | None = None
        self._writer: TableSink | None = None
        self._waiting: list[pa.Table] = []

    def write(self, table: pa.Table, *, predicted: bool) -> None:
        with naming(self._to):
            self._write(_without_lists(table) if self._flat else table, predicted)

    def finish(self) -> None:
        with naming(self._to):
            if self._writer is None:
                self._begin(self._waiting[0].schema if self._waiting else pa.schema([]))
            assert self._writer is not None
            self._writer.close()

    def _write(self, table: pa.Table, predicted: bool) -> None:
        if self._writer is None:
            if not predicted:
                self._waiting.append(table)
                return
            self._begin(table.schema)
        assert self._writer is not None and self._schema is not None
        self._writer.write_table(fitted(table, self._schema))

    def _begin(self, schema: pa.Schema) -> None:
        self._schema = schema
        self._writer = self._make(self._sink, schema)
        for table in self._waiting:
            self._writer.write_table(fitted(table, schema))
        self._waiting = []


@contextmanager
def whole_file(to: Path) -> Generator[PredictionFile]:
    """A file that is there when the block has ended well, and not otherwise."""
    _sweep_drafts(to)
    draft = to.with_name(f".{to.name}.{os.getpid()}.draft")
    try:
        with naming(to):
            sink: Sink = pa.OSFile(str(draft), "wb")
        try:
            file = PredictionFile(to, sink)
            yield file
            file.finish()
            with naming(to):
                sink.close()
        finally:
            with suppress(OSError):
                sink.close()
        with naming(to), open(draft, "rb") as written:
            os.fsync(written.fileno())
        os.replace(draft, to)
    finally:
        with suppress(OSError):
            draft.unlink()
    sync_folder(to.absolute().parent)


def _sweep_drafts(to: Path) -> None:
    """What processes left that were killed."""
    for draft in to.absolute().parent.glob(f".{glob.escape(to.name)}.*.draft"):
        pid = draft.name.removesuffix(".draft").rpartition(".")[2]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            with suppress(OSError):
                draft.unlink()


def fitted(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The table with these columns: nulls where it has none, numbers widened."""
    if table.schema.equals(schema):
        return table
    strange = [name for name in table.column_names if name not in schema.names]
    if strange:
        raise DataError(_UNEVEN)
    columns: list[Any] = []
    for field in schema:
        if field.name in table.column_names:
            columns.append(table.column(field.name).cast(field.type))
        else:
            columns.append(pa.nulls(table.num_rows, field.type))
    return pa.table(columns, schema=schema)


def _without_lists(table: pa.Table) -> pa.Table:
    """Lists as columns p0, p1, ...; of several columns of lists, NAME_0, NAME_1, ..."""
    for name in list(table.column_names):
        place = table.column_names.index(name)
        column: Any = table.column(place)
        if not pa.types.is_list(column.type):
            continue
        rows, inner = table.num_rows, column.combine_chunks()
        while pa.types.is_list(inner.type):
            sizes = set(inner.value_lengths().drop_null().to_pylist())
            if len(sizes) > 1:
                raise DataError(_UNEVEN)
            inner = inner.flatten()
        gone = column.is_null().to_numpy(zero_copy_only=False)
        there = int(rows - gone.sum())
        width = len(inner) // there if there else 0
        values = inner.to_numpy(zero_copy_only=False).reshape(there, width)
        table = table.remove_column(place)
        prefix = "p" if name == "prediction" else f"{name}_"
        for k in range(width):
            made = pa.array(values[:, k])
            if there < rows:
                where = gone.cumsum() * 0 - 1
                where[~gone] = range(there)
                made = made.take(pa.array(where, mask=gone))
            table = table.add_column(place + k, f"{prefix}{k}", made)
    return table
