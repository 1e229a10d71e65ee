# SPDX-License-Identifier: Apache-2.0
"""Raw files, chunk by chunk → encoded records and batches of them, in the order of the files.

Every record of a chunk is either a row of exactly one piece, or named as bad in one. What a record
becomes depends on that record and on the run's encoders, as in training. Columns that a model has
no need of (label, id, ...) may be missing or wrong: a placeholder stands for them.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from manyhands.data.columns.array_types import AnyArray
from manyhands.data.columns.arrays import compute, whole
from manyhands.data.columns.schema import ID, RECORD_BITS, form_of, type_of
from manyhands.data.encoding.encoders import attempt
from manyhands.data.encoding.fitted_encoders import Fitted
from manyhands.data.encoding.pack_columns import pack
from manyhands.data.encoding.unseen_values import UnseenValues, unseen
from manyhands.data.ordering.epoch_order import RecordVisit
from manyhands.data.ordering.record_randomness import Draw
from manyhands.data.reading.batch_columns import add_column, batch_columns, with_stacks
from manyhands.data.reading.pad_and_collate import Pick
from manyhands.data.serving.stored_encoders import SPARE, Serving
from manyhands.data.shards.shard_columns import columns_of
from manyhands.data.sources.cutting.source import AskedTypes, Bad, Chunk, Source, TablePiece
from manyhands.data.sources.formats.json_lines import JsonLines
from manyhands.data.sources.formats.tfrecord_files import TFRecords
from manyhands.data.sources.values.arrow_casting import convert
from manyhands.values.errors import DataError

INTEGERS = ("int64", "int32")


class RawWork(msgspec.Struct, frozen=True):
    """A chunk of a raw file, for whoever reads it."""

    source: Any
    """A `Source`."""
    first_file: int
    """How many files the sources before it have."""
    chunk: Chunk


@dataclass(frozen=True, slots=True)
class EncodedPiece:
    """Some neighbouring records of a file."""

    file: str
    table: pa.Table
    """Encoded, those that could be."""
    numbers: NDArray[np.int64]
    """Of each row: the record's number in its file."""
    kept: pa.Table
    """Raw columns that were asked for, of the same rows."""
    bad: list[Bad]
    """The others."""
    kept_of_bad: pa.Table
    """As `kept`, of the others: null what cannot be read."""
    absent: frozenset[str]
    """Columns that no record here has, in formats where a record need not have all."""
    unseen: dict[str, UnseenValues] = field(default_factory=dict[str, UnseenValues])
    """By column: values that encoders have no place for, if they are counted."""


@dataclass(frozen=True)
class RawReader:
    """Reads chunks as a run's encoders want them."""

    serving: Serving
    keep: tuple[str, ...] = ()
    """Raw columns that are handed on."""
    with_label: bool = False
    """The label is wanted: a record without one is bad."""
    counts: bool = False
    """Values that encoders do not know are counted."""

    def types(self) -> dict[str, str]:
        """What is read as what; the other columns are of no concern."""
        known = {column.name: column.type for column in self.serving.manifest.raw}
        found = {name: known.get(name, "string") for name in self.keep}
        for name, fit in self.serving.used.items():
            if fit.role != "label" or self.with_label:
                found |= self.serving.raw_types(name)
        return found

    def pieces(self, work: RawWork, target_bytes: int) -> Iterator[EncodedPiece]:
        source: Source = work.source
        file, number = source.files[work.chunk.file], work.first_file + work.chunk.file
        loose = isinstance(source, JsonLines | TFRecords)
        again = TextAgain(source, work.chunk, self._as_text(), target_bytes)
        for place, piece in enumerate(_read(source, work.chunk, self.types(), target_bytes)):
            bad = [b.record for b in piece.bad]
            types = {name: self.types()[name] for name in self.keep}
            kept = again.columns(place, bad, types) if bad and self.keep else None
            yield self.encoded(piece, file, number, loose=loose, kept_of_bad=kept)

    def _as_text(self) -> dict[str, str]:
        """Types with which a record that is bad for what one of its values is can be read."""
        kinds = {name: type_of(kind) for name, kind in self.types().items()}
        plain = [
            n for n, k in kinds.items() if not pa.types.is_nested(k) and not pa.types.is_binary(k)
        ]
        kept = {name: self.types()[name] for name in self.keep}
        return kept | dict.fromkeys(plain, "string")

    def nothing(self) -> EncodedPiece:
        """No records, encoded: to see what columns there would be."""
        table = pa.table({name: pa.nulls(0, type_of(kind)) for name, kind in self.types().items()})
        return self.encoded(TablePiece(table, np.empty(0, np.int64)), "", 0, loose=True)

    def encoded(
        self,
        piece: TablePiece,
        file: str,
        number: int,
        *,
        loose: bool,
        kept_of_bad: pa.Table | None = None,
    ) -> EncodedPiece:
        """Records that have been read. `loose`: those that lack a column are missing its value.
        `kept_of_bad`: of those that could not be read."""
        table, absent = self._complete(piece.table, file, loose=loose)
        ids = (np.int64(number) << RECORD_BITS) | piece.numbers
        groups = {n: m for n, m in self.serving.packed.items() if n in self.serving.used}
        raw = pack(table, groups).append_column(ID, pa.array(ids, pa.int64()))
        encoded, refused = attempt(self._fitted(table), raw)
        numbers = piece.numbers
        # As it was read: of the label, encoding is given none.
        there = piece.table.column_names
        kept = pa.table({n: (piece.table if n in there else table).column(n) for n in self.keep})
        bad = list(piece.bad)
        lost = fitted_to(kept.schema, kept_of_bad, len(bad))
        if refused:
            rows = list(refused)
            bad += [Bad(file, int(numbers[r]), -1, what) for r, what in refused.items()]
            lost = pa.concat_tables([lost, kept.take(pa.array(rows))])
            good = np.delete(np.arange(len(numbers)), rows)
            kept, numbers, raw = kept.take(pa.array(good)), numbers[good], raw.take(pa.array(good))
        strange = unseen(self.serving.used, raw, encoded) if self.counts else {}
        return EncodedPiece(file, encoded, numbers, kept, bad, lost, absent, strange)

    def _complete(
        self, table: pa.Table, file: str, *, loose: bool
    ) -> tuple[pa.Table, frozenset[str]]:
        """With every column that is read. Where records name their columns (`loose`), one that
        none of them names is missing in each; elsewhere the file lacks it, which is refused."""
        there, rows = set(table.column_names), table.num_rows
        needed: dict[str, pa.DataType] = {}
        lacking: list[str] = []
        for name, fit in self.serving.used.items():
            wanted = fit.role not in SPARE or (fit.role == "label" and self.with_label)
            for raw, kind in self.serving.raw_types(name).items():
                if raw not in there or (fit.role == "label" and not self.with_label):
                    needed[raw] = type_of(kind)
                    lacking += [raw] if wanted else []
        strange = [name for name in self.keep if name not in there]
        unknown = [*lacking, *(n for n in strange if n != self.serving.names_a_record)]
        if unknown and not loose:
            what = ", ".join(f"'{name}'" for name in unknown)
            raise DataError(f"{file} has no column {what}; there are {', '.join(sorted(there))}.")
        needed |= {name: type_of(self.types()[name]) for name in strange}
        for name, kind in needed.items():
            empty = pa.nulls(rows, kind)
            if name in there:
                table = table.set_column(table.column_names.index(name), name, empty)
            else:
                table = table.append_column(name, empty) if there or rows else table
        if not there and needed:  # records without any column have no table to append to
            table = pa.table({name: pa.nulls(rows, kind) for name, kind in needed.items()})
        return table, frozenset(lacking) if loose else frozenset()

    def _fitted(self, table: pa.Table) -> dict[str, Fitted]:
        """Nobody minds that a column is missing which the model has no need of."""
        spare = (*SPARE,) if not self.with_label else tuple(r for r in SPARE if r != "label")
        return {
            name: msgspec.structs.replace(fit, missing="") if fit.role in spare else fit
            for name, fit in self.serving.used.items()
        }


def _read(
    source: Source, chunk: Chunk, types: Mapping[str, str], target_bytes: int
) -> Iterator[TablePiece]:
    """Pieces in which whole numbers may be written as 3.0, as others write a column with gaps."""
    ints = [name for name, kind in types.items() if kind in INTEGERS]
    as_text = AskedTypes({**types, **dict.fromkeys(ints, "string")})
    again: Iterator[TablePiece] | None = None
    behind = 0
    for piece in source.read(chunk, AskedTypes(types), target_bytes):
        if not piece.bad or not ints:
            behind += 1
            yield piece
            continue
        again = again or source.read(chunk, as_text, target_bytes)
        (loose,) = itertools.islice(again, behind, behind + 1)
        behind = 0
        yield _whole_numbers(loose, {name: types[name] for name in ints})


def _whole_numbers(piece: TablePiece, types: Mapping[str, str]) -> TablePiece:
    """Text as whole numbers; records where it is none are bad."""
    table, bad = piece.table, {b.record: b for b in piece.bad}
    keep = np.ones(table.num_rows, np.bool_)
    file = piece.bad[0].file if piece.bad else ""
    for name, kind in types.items():
        if name not in table.column_names:
            continue
        text = whole(table.column(name).cast(pa.string()))
        made, wrong = convert(_plain_integers(text), type_of(kind))
        table = table.set_column(table.column_names.index(name), name, made)
        for row in wrong:
            record, shown = int(piece.numbers[row]), text[row].as_py()
            bad.setdefault(
                record, Bad(file, record, -1, f"column '{name}': '{shown}' is no {kind}")
            )
        keep[wrong] = False
    numbers = piece.numbers[keep]
    found = [bad[record] for record in sorted(bad)]
    return TablePiece(table.filter(pa.array(keep)), numbers, found)


def _plain_integers(column: pa.Array) -> pa.Array:
    text = column.cast(pa.string())
    return compute.replace_substring_regex(text, r"^\s*([+-]?\d+)\.0*\s*$", r"\1")


class TextAgain:
    """A chunk, read again with values as text: of a record that is bad, what is not can be told."""

    def __init__(
        self, source: Source, chunk: Chunk, types: Mapping[str, str], target_bytes: int
    ) -> None:
        self._source, self._chunk, self._types = source, chunk, AskedTypes(types)
        self._target_bytes, self._next = target_bytes, 0
        self._pieces: Iterator[TablePiece] | None = None

    def columns(self, place: int, records: Sequence[int], types: Mapping[str, str]) -> pa.Table:
        """Of these records of the piece at `place` (after the last); null what there is not."""
        piece = self._piece(place)
        rows = {} if piece is None else {int(n): k for k, n in enumerate(piece.numbers)}
        chosen = pa.array([rows.get(record) for record in records], pa.int64())
        found: dict[str, pa.Array] = {}
        for name, kind in types.items():
            found[name] = pa.nulls(len(records), type_of(kind))
            if piece is not None and name in piece.table.column_names:
                column = whole(piece.table.column(name)).take(chosen)
                with suppress(pa.ArrowNotImplementedError):
                    plain = _plain_integers(column) if kind in INTEGERS else column
                    found[name], _ = convert(plain, type_of(kind), form_of(kind))
        return pa.table(found)

    def _piece(self, place: int) -> TablePiece | None:
        try:
            if self._pieces is None:
                self._pieces = self._source.read(self._chunk, self._types, self._target_bytes)
            piece = next(itertools.islice(self._pieces, place - self._next, None), None)
        except (DataError, pa.ArrowException):  # it is for a hint: the record is bad in any case
            return None
        self._next = place + 1
        return piece


def fitted_to(schema: pa.Schema, table: pa.Table | None, rows: int) -> pa.Table:
    """A table of these columns; null where the other has none that fits."""
    columns: dict[str, pa.Array] = {}
    for field_ in schema:
        columns[field_.name] = pa.nulls(rows, field_.type)
        if table is not None and table.schema.field(field_.name).type == field_.type:
            columns[field_.name] = whole(table.column(field_.name))
    return pa.table(columns, schema=schema)


class EncodedBatches:
    """Encoded records in memory, as batches: what shards of the same records would give."""

    def __init__(self, serving: Serving, table: pa.Table) -> None:
        data, schema = serving.data, serving.manifest.schema
        self._data, self._kinds = data, batch_columns(schema, data)
        made = {c.name: c for c in schema}
        rows = table.num_rows
        for name in made.keys() - {*table.column_names}:
            if made[name].role == "weight":  # what --balance adds for training
                table = table.append_column(name, pa.array(np.ones(rows, np.float32)))
        columns = columns_of(table, tuple(made[n] for n in table.column_names if n in made))
        self._columns = with_stacks(columns, rows, data.stack)
        self._size = rows

    def batch(self, start: int, stop: int, seed: int) -> dict[str, Any]:
        ids = np.arange(start, min(stop, self._size))
        batch: dict[str, Any] = {}
        for name, kind in self._kinds:
            rows: list[AnyArray | Any] = [self._columns[name]]
            picks = [Pick(ids, slice(None))]
            add_column(batch, name, kind, rows, picks, len(ids), self._data.pad)
        if self._data.transform is None:
            return batch
        visit = RecordVisit(seed, training=False)
        draw = Draw(visit.seed, visit.epoch, batch[ID].numpy(), visit.training)
        return self._data.transform(batch, draw)


def merged_rows(good: NDArray[np.int64], bad: Sequence[int]) -> NDArray[np.int64]:
    """Where the rows of a file stand, good ones first and bad ones behind them, in its order."""
    return np.argsort(np.concatenate([good, np.asarray(bad, np.int64)]), kind="stable")
