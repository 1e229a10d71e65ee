# SPDX-License-Identifier: Apache-2.0
"""Where records begin in a file of lines, quoted or not, in one pass over blocks of bytes.

A record ends with a line, unless that line end is inside quotes. A quote opens only at the start of
a field; inside quotes a doubled quote is one quote; anywhere else a quote is data. Lines of nothing
but white space are no records. A quote that the file never closes makes one bad record, and reading
goes on after the line that opened it. (There is at most one in a file: behind it all runs of quotes
are even, and such a run closes what it opens.)

Invariant: which records there are, and their numbers, depend on neither the blocks nor the chunks.
At most one block and one record of `limit` bytes are held.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from manyhands.data.columns.array_types import Positions
from manyhands.data.sources.access import files
from manyhands.data.sources.cutting.source import Bad, Chunk
from manyhands.values.errors import DataError

BlockReader = Callable[[int], Iterator[bytes]]
"""The bytes of a file from a place on."""

NEWLINE = 10
MAX_FIELD = 16 << 20
PLAN_BLOCK_BYTES = 4 << 20
TO_THE_END = -1
"""`Chunk.stop` of a file that is read as a stream, because it is compressed."""
_SHOWN = 120
_CACHED = 256 << 10
_MOST_BYTES = 512 << 20
"""Of a block: Arrow counts the bytes of a column of text in 31 bits."""

RecordTrouble = Literal["", "too long", "quote"]


@dataclass(frozen=True, slots=True)
class RecordRule:
    """What a record is."""

    delimiter: bytes = b""
    """One byte; looked at only where there is a quote."""
    quote: bytes = b""
    space: bytes = b" \t\r\v\f"
    """A line of only these is blank."""
    paragraphs: bool = False
    """Records are ended by blank lines, not by lines."""
    limit: int = MAX_FIELD
    """A record of more bytes, its line end included, is too long, be it blank or not."""


@dataclass(frozen=True, slots=True)
class FoundRecords:
    """Neighbouring records; or one that cannot be had, of which only the beginning is here."""

    data: bytes
    start: int
    """Where `data` begins in the file."""
    first: int
    """The number of the first record."""
    begins: Positions
    stops: Positions
    """Of each record, in `data`, without its line end."""
    trouble: RecordTrouble = ""

    def __len__(self) -> int:
        return len(self.begins)

    def record(self, i: int) -> bytes:
        return self.data[self.begins[i] : self.stops[i]]

    def span(self, i: int, j: int) -> bytes:
        """The bytes of the records [i, j), line ends included."""
        stop = self.begins[j] if j < len(self.begins) else len(self.data)
        return self.data[self.begins[i] : stop]

    def bad(self, file: str, i: int, what: str) -> Bad:
        beginning = self.data[self.begins[i] : min(self.stops[i], self.begins[i] + _SHOWN)]
        byte = self.start + int(self.begins[i])
        return Bad(file, self.first + i, byte, what, printable(beginning))


def printable(data: bytes) -> str:
    """The beginning of a record for people: one line, nothing invisible."""
    text = data[:_SHOWN].decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class Scan:
    """Finds record ends in blocks that follow one another."""

    def __init__(self, rule: RecordRule, at: int) -> None:
        self.rule = rule
        self.at = at
        self.open = False
        """Whether the next byte is inside quotes."""
        self.after = -1
        """The first byte after the line in which the last quote was opened; -1: not seen yet."""
        self._closed_at = -2
        self._last = NEWLINE
        self._ink = False
        self._space = _table(rule.space + b"\n")

    def ends(self, block: bytes) -> Positions:
        """The places in `block` just behind each record's end."""
        data = np.frombuffer(block, np.uint8)
        lines = _places(data, NEWLINE) + 1
        if self.rule.quote and (self.open or self.rule.quote in block):
            lines = self._outside_quotes(block, data, lines)
        if self.rule.paragraphs:
            lines = self._blank(data, lines)
        self.at += len(block)
        self._last = block[-1] if block else self._last
        return lines

    def _outside_quotes(self, block: bytes, data: NDArray[np.uint8], lines: Positions) -> Positions:
        marks = _places(data, ord(self.rule.quote))
        if not len(marks):  # all of it is inside
            self._note_line(block, 0)
            return marks
        before = data[marks - 1]
        if marks[0] == 0:
            before[0] = self._last
        starts = (before == NEWLINE) | (before == ord(self.rule.delimiter))
        previous = np.concatenate(([self._closed_at - self.at], marks[:-1]))
        opens = slice(int(self.open), None, 2)
        # Without quotes that are data, opening and closing ones alternate; a doubled one is both.
        if not (starts[opens] | (previous[opens] == marks[opens] - 1)).all():
            marks = self._without_strays(marks, starts)
        inside = (np.searchsorted(marks, lines) + self.open) % 2 == 1
        self._note_quotes(block, marks)
        return lines[~inside]

    def _without_strays(self, marks: Positions, starts: NDArray[np.bool_]) -> Positions:
        is_open, closed_at = self.open, self._closed_at - self.at
        kept: list[int] = []
        for mark, at_start in zip(marks.tolist(), starts.tolist(), strict=True):
            if is_open:
                is_open, closed_at = False, mark
            elif at_start or closed_at == mark - 1:
                is_open = True
            else:
                continue
            kept.append(mark)
        return np.array(kept, dtype=np.int64)

    def _note_quotes(self, block: bytes, marks: Positions) -> None:
        """Remember what the block leaves open, and in which line it was opened."""
        if not len(marks):
            return
        closed_before, closed_at = self._closed_at - self.at, -2
        self.open = bool((len(marks) + self.open) % 2)
        if not self.open:
            closed_at = int(marks[-1])
        i = len(marks) - (1 if self.open else 2)
        while i > 0 and marks[i - 1] == marks[i] - 1:  # doubled: it was opened before
            i -= 2
        if i > 0 or (i == 0 and closed_before != marks[0] - 1):
            self.after = -1
            self._note_line(block, int(marks[i]))
        else:
            self._note_line(block, 0)
        self._closed_at = self.at + closed_at

    def _note_line(self, block: bytes, place: int) -> None:
        end = block.find(b"\n", place) if self.after < 0 else -1
        if end >= 0:
            self.after = self.at + end + 1

    def _blank(self, data: NDArray[np.uint8], lines: Positions) -> Positions:
        """Only the ends of blank lines."""
        if not len(data):
            return lines
        begins = np.concatenate(([0], lines))
        begins = begins[begins < len(data)]
        ink = np.logical_or.reduceat(~self._space[data], begins)
        ink[0] |= self._ink
        self._ink = bool(ink[-1]) if len(begins) > len(lines) else False
        return lines[~ink[: len(lines)]]


def _places(data: NDArray[np.uint8], byte: int) -> Positions:
    """Where a byte is, looked for in parts that the processor's cache holds."""
    parts = [
        np.flatnonzero(data[at : at + _CACHED] == byte) + at for at in range(0, len(data), _CACHED)
    ]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _table(chars: bytes) -> NDArray[np.bool_]:
    table = np.zeros(256, dtype=np.bool_)
    table[list(chars)] = True
    return table


def find_records(
    read: BlockReader, rule: RecordRule, start: int = 0, first: int = 0
) -> Iterator[FoundRecords]:
    """All records from `start`, where one begins, to where `read` ends."""
    at, number = start, first
    while True:
        scan = Scan(rule, at)
        rest, rest_at, dropped = b"", at, False
        for block in read(at):
            block_at = scan.at
            ends = scan.ends(block)
            if dropped:
                if not len(ends):
                    continue
                yield _lost(rest, rest_at, number, "too long")
                number, dropped = number + 1, False
                rest, rest_at, block = b"", block_at + int(ends[0]), block[ends[0] :]
                ends = ends[1:] - ends[0]
            data = rest + block
            if len(ends):
                for found in _lines(data, rest_at, number, ends + len(rest), rule):
                    yield found
                    number += len(found)
                last = int(ends[-1]) + len(rest)
                rest, rest_at = data[last:], rest_at + last
            else:
                rest = data
            if len(rest) > rule.limit:
                rest, dropped = rest[: min(_SHOWN, rule.limit)], True
        if not scan.open:
            break
        if scan.after < 0:
            yield _lost(rest, rest_at, number, "quote")
            return
        yield _lost(rest[: scan.after - rest_at].rstrip(), rest_at, number, "quote")
        at, number = scan.after, number + 1
    if dropped:
        yield _lost(rest, rest_at, number, "too long")
    elif rest:
        yield from _lines(rest, rest_at, number, np.array([len(rest)]), rule)


def _lost(beginning: bytes, start: int, number: int, trouble: RecordTrouble) -> FoundRecords:
    beginning = beginning[:_SHOWN]
    stops = np.array([len(beginning)])
    return FoundRecords(beginning, start, number, np.zeros(1, np.int64), stops, trouble)


def _lines(
    data: bytes, start: int, first: int, ends: Positions, rule: RecordRule
) -> Iterator[FoundRecords]:
    """The records that end at `ends`; blank ones are left out, long ones come by themselves."""
    begins = np.concatenate(([0], ends[:-1]))
    long = ends - begins > rule.limit
    keep = long | ~_blanks(data, begins, ends, rule.space)
    begins, ends, long = begins[keep], ends[keep], long[keep]
    if not len(begins):
        return
    at = 0
    for i in [*np.flatnonzero(long).tolist(), len(begins)]:
        if at < i:
            stop = int(ends[i - 1])
            yield _found(data[:stop], start, first + at, begins[at:i], ends[at:i])
        if i < len(begins):
            beginning = data[begins[i] : begins[i] + rule.limit]
            yield _lost(beginning, start + int(begins[i]), first + i, "too long")
        at = i + 1


def _found(data: bytes, start: int, first: int, begins: Positions, ends: Positions) -> FoundRecords:
    offset = int(begins[0])
    array = np.frombuffer(data, np.uint8)
    stops = ends - (array[ends - 1] == NEWLINE)
    stops -= (stops < ends) & (stops > begins) & (array[stops - 1] == ord("\r"))
    data = data[offset:] if offset else data
    return FoundRecords(data, start + offset, first, begins - offset, stops - offset)


def _blanks(data: bytes, begins: Positions, ends: Positions, space: bytes) -> NDArray[np.bool_]:
    array, table = np.frombuffer(data, np.uint8), _table(space + b"\n")
    blank = table[array[begins]] & table[array[np.maximum(ends - 2, begins)]]
    strip = space + b"\n"
    for i in np.flatnonzero(blank & (ends - begins > 1)).tolist():
        blank[i] = not data[begins[i] : ends[i]].strip(strip)
    return blank


def chunks_of(url: str, file: int, rule: RecordRule, begin: int, target_bytes: int) -> list[Chunk]:
    """A file cut at the first record behind each multiple of `target_bytes`; a compressed file is
    one chunk, for it can be read from its beginning only."""
    size = files.size_of(url)
    if files.compression_of(url):
        return [Chunk(file, begin, TO_THE_END, 0, 4 * size)]
    block_bytes = min(max(target_bytes, 1 << 20), PLAN_BLOCK_BYTES)
    found = find_records(blocks_of(url, size, block_bytes), rule, begin)
    return cut(found, file, begin, size, target_bytes)


def cut(
    records: Iterable[FoundRecords], file: int, begin: int, size: int, target_bytes: int
) -> list[Chunk]:
    """Chunks that begin at the first record behind each multiple of `target_bytes`."""
    cuts: list[tuple[int, int]] = []
    for found in records:
        if not cuts:
            cuts.append((begin, 0))
        places = found.start + found.begins
        while True:
            i = int(np.searchsorted(places, (cuts[-1][0] // target_bytes + 1) * target_bytes))
            if i == len(places):
                break
            cuts.append((int(places[i]), found.first + i))
    stops = [*(start for start, _ in cuts[1:]), size]
    return [
        Chunk(file, start, stop, first, stop - start)
        for (start, first), stop in zip(cuts, stops, strict=False)
    ]


def records_of(
    url: str, chunk: Chunk, rule: RecordRule, target_bytes: int
) -> Iterator[FoundRecords]:
    """The records of a chunk, about `target_bytes` of them at a time."""
    read = blocks_of(url, chunk.stop, block_bytes_of(chunk, target_bytes))
    return find_records(read, rule, chunk.start, chunk.first)


def block_bytes_of(chunk: Chunk, target_bytes: int) -> int:
    """Blocks of near `target_bytes` and of equal size: no tiny one at the end."""
    target_bytes = max(1, min(target_bytes, _MOST_BYTES))
    if chunk.stop == TO_THE_END:
        return target_bytes
    size = max(1, chunk.stop - chunk.start)
    return -(-size // max(1, round(size / target_bytes)))


def blocks_of(url: str, stop: int, block_bytes: int) -> BlockReader:
    """How to read a file from any place to `stop`."""

    def stored(start: int) -> Iterator[bytes]:
        for at in range(start, stop, block_bytes):
            wanted = min(at + block_bytes, stop)
            block = files.read_range(url, at, wanted)
            if len(block) < wanted - at:
                raise DataError(
                    f"{files.shown(url)} became shorter while it was read ({at + len(block):,} "
                    f"bytes, {stop:,} when it was planned). Start again when it is complete."
                )
            yield block

    def streamed(start: int) -> Iterator[bytes]:
        with files.open_bytes(url) as file:
            while start > 0:
                start -= len(file.read(min(start, block_bytes))) or start
            while block := file.read(block_bytes):
                yield block

    return streamed if stop == TO_THE_END else stored
