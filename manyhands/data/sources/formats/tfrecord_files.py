# SPDX-License-Identifier: Apache-2.0
# pyright: reportAttributeAccessIssue=false
# (the functions of pyarrow.compute are made when it is imported)
"""TFRecord files of tf.train.Examples and SequenceExamples.

Local files are cut by following the lengths in the headers; a compressed or remote file is one
chunk, read as a stream. Every checksum is checked. After a header that is damaged the next one
whose checksum fits is looked for: what lies between is one bad record, and the others are read.

Invariant: planning and reading walk over a file by the same steps, so they number records alike.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from manyhands.data.columns.array_types import Positions
from manyhands.data.sources.access.decompress import is_tfrecord
from manyhands.data.sources.access.files import (
    compression_of,
    local_path,
    open_anywhere,
    open_bytes,
    shown,
    size_of,
)
from manyhands.data.sources.cutting.source import Bad, Chunk, TablePiece, Types
from manyhands.data.sources.values.arrow_casting import piece_of
from manyhands.data.tfrecord.feature_kinds import MOST_BYTES
from manyhands.data.tfrecord.framing import FOOTER, HEADER, check, index
from manyhands.data.tfrecord.parse_examples import parse

_TO_THE_END = 1 << 62
_WINDOW = 4 << 20
_LARGE_RECORD = 16 << 10
_HOPS = 4096
_BLOCK_BYTES = 16 << 20
_CONTROL = r"[\x00-\x08\x0b\x0c\x0e-\x1f]"
_EMPTY = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class TFRecords:
    urls: tuple[str, ...] = field(repr=False)  # they may hold secrets
    notes: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    """Words for a missing value."""

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(shown(url) for url in self.urls)

    def chunks(self, target_bytes: int) -> list[Chunk]:
        found: list[Chunk] = []
        for number, url in enumerate(self.urls):
            size = size_of(url)
            if local_path(url) is None or compression_of(url):
                found.append(Chunk(number, 0, _TO_THE_END, 0, size))
                continue
            with open_anywhere(url) as file:
                found += _cut(number, _Forward(file, 0), size, target_bytes)
        return found

    def read(self, chunk: Chunk, types: Types, target_bytes: int) -> Iterator[TablePiece]:
        url = self.urls[chunk.file]
        streamed = chunk.stop == _TO_THE_END
        with open_bytes(url) if streamed else open_anywhere(url) as file:
            first = chunk.first
            forward = _Forward(file, 0)
            for stretch in _stretches(forward, chunk.start, chunk.stop, target_bytes):
                yield _piece(stretch, shown(url), first, types, self.missing)
                first += stretch.records


class _Forward:
    """The bytes of a file at places that never go back."""

    def __init__(self, file: BinaryIO, at: int) -> None:
        self._file, self._at, self._data = file, at, b""
        self._seekable = file.seekable()

    def bytes_at(self, at: int, size: int) -> bytes:
        """`size` bytes from `at` on; fewer at the end of the file, whatever is asked for."""
        behind = self._at + len(self._data)
        if at > behind and self._seekable:
            self._file.seek(at)
            self._at, self._data = at, b""
        while at > behind and not self._seekable:
            skipped = self._file.read(min(at - behind, _BLOCK_BYTES))
            self._at, self._data = behind + len(skipped), b""
            behind = self._at if skipped else at
        parts = [self._data[at - self._at :]]
        self._at, missing = at, size - len(parts[0])
        while missing > 0 and (part := self._file.read(min(missing, _BLOCK_BYTES))):
            parts.append(part)
            missing -= len(part)
        self._data = parts[0] if len(parts) == 1 else b"".join(parts)
        return self._data if len(self._data) <= size else self._data[:size]


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Neighbouring records in memory."""

    data: bytes
    at: int
    """The byte of the file at which `data` begins."""
    starts: Positions
    lengths: Positions
    bad: tuple[int, str] | None = None
    """A record after these that is none: its byte and what is wrong."""

    @property
    def records(self) -> int:
        return len(self.starts) + (self.bad is not None)


def _stretches(file: _Forward, start: int, stop: int, target_bytes: int) -> Iterator[_Stretch]:
    """All records in [start, stop), about `target_bytes` at a time."""
    at, wanted = start, target_bytes
    while at < stop:
        asked = min(wanted, stop - at)
        data = file.bytes_at(at, asked)
        if not data:
            return
        starts, lengths, damage = index(data)
        if damage is None:
            yield _Stretch(data, at, starts, lengths)
            at, wanted = at + len(data), target_bytes
            continue
        place, needed = at + damage.byte, len(data) - damage.byte + damage.short
        goes_on = damage.short and len(data) == asked and place + needed <= stop
        if goes_on and needed <= MOST_BYTES:
            if len(starts):
                yield _Stretch(data, at, starts, lengths)
            at, wanted = place, max(target_bytes, needed)
            continue
        end = _end_of_damage(file, place, stop, needed if damage.short else 0)
        if not damage.short:
            what = f"the checksum of its length is wrong; {end - place:,} bytes are given up"
        elif goes_on:
            what = f"it has {needed:,} bytes; more than {MOST_BYTES:,} cannot be read"
        else:
            there = stop - place if len(data) == asked else len(data) - damage.byte
            what = f"it is cut off: {there:,} bytes are there, {needed - there:,} are missing"
        yield _Stretch(data, at, starts, lengths, (place, what))
        at, wanted = end, target_bytes


def _end_of_damage(file: _Forward, place: int, stop: int, needed: int) -> int:
    """Where to go on after a record that begins at `place` and cannot be used."""
    if needed:  # its header is right: it ends where it says, or the file before that
        return min(stop, place + needed)
    at = place + 1
    while at < stop:
        data = file.bytes_at(at, min(_WINDOW, stop - at))
        found = _next_header(data)
        if found is not None:
            return at + found
        if len(data) < min(_WINDOW, stop - at):
            return at + len(data)
        at += max(1, len(data) - HEADER + 1)
    return stop


def _next_header(data: bytes) -> int | None:
    """The first place where a length stands with its checksum."""
    array = np.frombuffer(data, dtype=np.uint8)
    if len(array) < HEADER:
        return None
    # The three highest bytes of a length are 0: no record has a terabyte.
    zeros = (array[5:-6] | array[6:-5] | array[7:-4]) == 0
    some = array[:-11] | array[1:-10] | array[2:-9] | array[3:-8] | array[4:-7]
    for place in np.flatnonzero(zeros & (some != 0)).tolist():
        if is_tfrecord(data[place : place + HEADER]):
            return place
    return None


def _piece(
    stretch: _Stretch, file: str, first: int, types: Types, missing: tuple[str, ...]
) -> TablePiece:
    damaged = check(stretch.data, stretch.starts, stretch.lengths)
    good = np.delete(np.arange(len(stretch.starts)), damaged)
    starts, lengths = stretch.starts[good], stretch.lengths[good]
    parsed = parse(stretch.data, starts, lengths)
    places = stretch.at + stretch.starts - HEADER
    wrong = [(int(i), "the checksum of its data is wrong") for i in damaged]
    wrong += [(int(good[d.record]), d.what) for d in parsed.bad]
    bad = [Bad(file, first + i, int(places[i]), what) for i, what in wrong]
    if stretch.bad is not None:
        bad.append(Bad(file, first + len(stretch.starts), *stretch.bad))
    rows = good[parsed.rows]
    if not len(rows):
        return TablePiece(pa.table({}), _EMPTY, sorted(bad, key=lambda b: b.record))
    table = _with_text(parsed.table, types)
    return piece_of(
        table,
        first + rows,
        file=file,
        types=types,
        places=places[rows],
        bad=bad,
        missing=missing,
    )


def _with_text(table: pa.Table, types: Types) -> pa.Table:
    """Bytes that are all readable text as text: Examples do not tell the one from the other."""
    for i, name in enumerate(table.column_names):
        values = table.column(i)
        if pa.types.is_binary(types.get(name, pa.null())):
            continue
        if values.type == pa.binary() and _is_text(values):
            table = table.set_column(i, name, values.cast(pa.string()))
        elif values.type == pa.list_(pa.binary()) and _is_text(pc.list_flatten(values)):
            table = table.set_column(i, name, values.cast(pa.list_(pa.string())))
    return table


def _is_text(values: pa.ChunkedArray) -> bool:
    try:
        texts = values.cast(pa.string())
    except pa.ArrowInvalid:
        return False
    return not pc.any(pc.match_substring_regex(texts, _CONTROL)).as_py()


def _cut(number: int, file: _Forward, size: int, target_bytes: int) -> list[Chunk]:
    """Chunks of about `target_bytes`, each from the header of one record to that of another."""
    found: list[Chunk] = []
    start = first = record = 0
    for heads, records in _heads(file, size):
        while len(heads) and heads[-1] - start >= target_bytes:
            i = int(np.searchsorted(heads, start + target_bytes))
            cut = int(heads[i])
            found.append(Chunk(number, start, cut, first, cut - start))
            start, first = cut, record + i
        record += records
    if size > start:
        found.append(Chunk(number, start, size, first, size - start))
    return found


def _heads(file: _Forward, size: int) -> Iterator[tuple[Positions, int]]:
    """Where good headers are, and how many records they and a damaged one after them are."""
    at = 0
    while at < size:
        large, at = _hop(file, at, size)
        if large:
            yield np.array(large, dtype=np.int64), len(large)
            continue
        data = file.bytes_at(at, min(_WINDOW, size - at))
        if not data:
            return
        starts, _, damage = index(data)
        heads, records = at + starts - HEADER, len(starts)
        if damage is None:
            at += len(data)
        else:
            place, left = at + damage.byte, len(data) - damage.byte
            at = place
            if left >= HEADER or place + left >= size:  # else only its header is cut, only here
                records += 1
                heads = np.append(heads, place) if damage.short and left >= HEADER else heads
                at = _end_of_damage(file, place, size, left + damage.short if damage.short else 0)
        yield heads, records


def _hop(file: _Forward, at: int, size: int) -> tuple[list[int], int]:
    """Over whole large records: only their headers are read."""
    heads: list[int] = []
    while len(heads) < _HOPS:
        header = file.bytes_at(at, HEADER)
        end = at + HEADER + int.from_bytes(header[:8], "little") + FOOTER
        if not is_tfrecord(header) or end - at < _LARGE_RECORD or end > size:
            break
        heads.append(at)
        at = end
    return heads, at
