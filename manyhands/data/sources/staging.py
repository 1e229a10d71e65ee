# SPDX-License-Identifier: Apache-2.0
"""Staging: raw chunks → typed Arrow pieces on disk, every bad record named.

Parsing is the expensive and the dangerous part, so it happens once; whatever comes after reads
clean, memory-mapped pieces. Columns are typed by what each piece holds. The types of all pieces are
then joined, and a chunk that had read a column too narrowly to be widened without loss (007 as 7,
where another chunk has 00A) is staged again with the joined types.

Invariant: records of a chunk = rows of its pieces + its bad records.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from manyhands.data.columns.exact_integers import is_wide
from manyhands.data.columns.schema import (
    ID,
    RECORD_BITS,
    name_of,
    plain,
    settled_name,
    type_of,
    unify,
)
from manyhands.data.sources.cutting.source import AskedTypes, Bad, Chunk, Source
from manyhands.data.sources.values.date_order import DateOrder, DatesSeen, dates_seen, order_of
from manyhands.values.errors import DataError
from manyhands.values.run_folder import write_whole

SHOWN = 5
"""Bad records that a message lists."""


class Staged(msgspec.Struct, frozen=True):
    """A piece on disk."""

    file: str
    rows: int
    nbytes: int
    types: dict[str, str]
    """In the order of its columns."""
    wide: list[str] = []
    """Columns of whole numbers some of which no float64 is."""
    dates: dict[str, DatesSeen] = {}
    """Columns that are to be times and are text still: what shows how to read them."""


class Stage(msgspec.Struct, frozen=True):
    """What became of a chunk."""

    chunk: int
    pieces: list[Staged]
    records: int
    bad: int
    bad_file: str = ""


def stage(
    source: Source,
    first_file: int,
    chunk: Chunk,
    number: int,
    types: Mapping[str, str],
    target_bytes: int,
    folder: str,
    skip: int,
) -> Stage:
    """Read a chunk. `first_file`: how many files the sources before this one have."""
    pieces: list[Staged] = []
    bad: list[Bad] = []
    asked = AskedTypes(types)
    for piece in source.read(chunk, asked, target_bytes):
        bad += piece.bad
        if len(bad) > skip:
            raise DataError(too_many(bad, skip))
        if piece.table.num_rows == 0:
            continue
        ids = (np.int64(first_file + chunk.file) << RECORD_BITS) | piece.numbers
        table = as_plain(piece.table).append_column(ID, pa.array(ids, pa.int64()))
        path = Path(folder) / f"{number:06}-{len(pieces):04}.arrow"
        nbytes = write_table(path, table)
        kinds = {f.name: name_of(f.type) for f in table.schema if f.name != ID}
        wide = [name for name in kinds if is_wide(table.column(name))]
        times = [n for n, kind in asked.items() if n in kinds and pa.types.is_timestamp(kind)]
        dates = {name: dates_seen(table.column(name)) for name in times}
        seen = {name: found for name, found in dates.items() if found is not None}
        pieces.append(Staged(path.name, table.num_rows, nbytes, kinds, wide, seen))
    bad_file = ""
    if bad:
        bad_file = f"{number:06}.bad"
        lines = b"\n".join(msgspec.json.encode(b) for b in bad) + b"\n"
        write_whole(Path(folder) / bad_file, lines)
    rows = sum(p.rows for p in pieces)
    return Stage(number, pieces, rows + len(bad), len(bad), bad_file)


def too_many(bad: Sequence[Bad], skip: int, total: int | None = None, *, first: int = 1) -> str:
    """The message for bad records beyond what may be skipped; `first` as in `Bad.told`."""
    total = len(bad) if total is None else total
    listed = "\n".join(f"  {b.told(first=first)}" for b in bad[:SHOWN])
    more = f"\n  ... and {total - SHOWN:,} more" if total > SHOWN else ""
    if skip == 0:
        advice = "Mend them, or leave them out and have them listed: --on-error skip:100"
    else:
        advice = f"--on-error skip:{skip} allows {skip:,}; mend them, or raise the limit."
    return f"{total:,} bad record{'s' * (total != 1)}:\n{listed}{more}\n{advice}"


def as_plain(table: pa.Table) -> pa.Table:
    """The same values in types of ours. A column with the name of our ids gets another."""
    if ID in table.column_names:
        names = ("id", *(f"id_{k}" for k in range(2, table.num_columns + 2)))
        free = next(n for n in names if n not in table.column_names)
        table = table.rename_columns([free if n == ID else n for n in table.column_names])
    for i, field in enumerate(table.schema):
        kind = plain(field.type)
        if kind != field.type:
            values = table.column(i)
            if pa.types.is_dictionary(field.type):
                values = values.cast(field.type.value_type)
            table = table.set_column(i, field.name, values.cast(kind, safe=False))
    return table


def write_table(path: Path, table: pa.Table) -> int:
    """An IPC file that appears whole; how many bytes it has."""
    draft = path.with_name(path.name + ".draft")
    with pa.OSFile(str(draft), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    with draft.open("rb") as file:
        os.fsync(file.fileno())
    nbytes = draft.stat().st_size
    draft.rename(path)
    return nbytes


# ---- types of all pieces together


def joined_types(
    stages: Sequence[Stage], given: Mapping[str, str], *, one_is_list: bool = False
) -> dict[str, str]:
    """Every column's type, in the order in which columns were first seen."""
    kinds: dict[str, set[str]] = {}
    for stage in stages:
        for piece in stage.pieces:
            for name, kind in piece.types.items():
                kinds.setdefault(name, set()).add(kind)
    joined = {
        name: name_of(unify(map(type_of, sorted(found)), one_is_list=one_is_list))
        for name, found in kinds.items()
    }
    wide = {name for stage in stages for piece in stage.pieces for name in piece.wide}
    joined |= {name: "string" for name in wide if "float" in joined[name]}  # else they are rounded
    return joined | {n: settled_name(kind) for n, kind in given.items() if n in joined}


def date_orders(stages: Sequence[Stage]) -> dict[str, DateOrder]:
    """How dates are read in columns that are to be times, where it matters and is not said."""
    seen: dict[str, list[DatesSeen]] = {}
    for stage in stages:
        for piece in stage.pieces:
            for name, found in piece.dates.items():
                seen.setdefault(name, []).append(found)
    orders = {name: order_of(name, found) for name, found in seen.items()}
    return {name: order for name, order in orders.items() if order is not None}


def too_narrow(stage: Stage, types: Mapping[str, str]) -> bool:
    """Whether a chunk must be read again, because its values cannot be widened to `types`."""
    return any(
        not _widens(type_of(kind), type_of(types[name]))
        for piece in stage.pieces
        for name, kind in piece.types.items()
    )


def _widens(kind: pa.DataType, to: pa.DataType) -> bool:
    if kind == to or pa.types.is_null(kind):
        return True
    if pa.types.is_list(to):
        many = pa.types.is_list(kind) or pa.types.is_fixed_size_list(kind)
        return _widens(kind.value_type if many else kind, to.value_type)
    numbers = [pa.uint8(), pa.int32(), pa.int64(), pa.float32(), pa.float64()]
    if kind in numbers and to in numbers:
        return numbers.index(kind) <= numbers.index(to)
    return False


def read_piece(path: Path, types: Mapping[str, str]) -> pa.Table:
    """A staged piece with these columns and types, and the records' ids."""
    with pa.memory_map(str(path)) as source:
        table = pa.ipc.open_file(source).read_all()
    columns: dict[str, pa.ChunkedArray | pa.Array] = {}
    there = set(table.column_names)
    for name, kind in types.items():
        if name in there:
            columns[name] = _cast(table.column(name), type_of(kind))
        else:
            columns[name] = pa.nulls(table.num_rows, type_of(kind))
    return pa.table({ID: table.column(ID), **columns})


def _cast(values: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    if pa.types.is_list(kind) and pa.types.is_fixed_size_list(values.type):
        values = values.cast(pa.list_(values.type.value_type))
    elif pa.types.is_list(kind) and not pa.types.is_list(values.type):
        values = pa.chunked_array([_lists_of_one(chunk) for chunk in values.chunks])
    return values if values.type == kind else pc.cast(values, kind, safe=False)


def _lists_of_one(values: pa.Array) -> pa.ListArray:
    offsets = pa.array(range(len(values) + 1), pa.int32())
    return pa.ListArray.from_arrays(offsets, values, mask=values.is_null())


def read_bad(folder: Path, stages: Sequence[Stage]) -> Iterator[Bad]:
    """The bad records of all chunks, in order."""
    for stage in stages:
        if stage.bad_file:
            for line in (folder / stage.bad_file).read_bytes().splitlines():
                yield msgspec.json.decode(line, type=Bad)
