# SPDX-License-Identifier: Apache-2.0
"""Sorting more than memory holds: sorted runs on disk, cut into ranges, merged as they are read.

A run is a file of (key, value) pairs in the order of their keys, in blocks that are read one at a
time; where each block begins, and with which key, is known without opening the file. Pairs with
equal keys keep the order in which they were given: within a run, and from run to run.

Memory: a `Sorter` holds about `memory_bytes` of pairs; merging holds one block per run.
"""

import os
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from heapq import merge
from operator import itemgetter
from pathlib import Path

import msgspec
import xxhash

from manyhands.values.errors import DataDamaged

Pair = tuple[bytes, bytes]

OVERHEAD = 160
"""About what Python needs for a pair beside its bytes."""

FAN_IN = 256
"""Runs that are merged at once."""


class Block(msgspec.Struct, frozen=True, array_like=True):
    first: bytes
    """The key it begins with."""
    offset: int
    nbytes: int
    held: int
    """About how much memory its pairs take."""
    checksum: int


class SortedRun(msgspec.Struct, frozen=True):
    file: str
    """Its name in the folder of runs."""
    pairs: int
    blocks: list[Block]


_block = msgspec.msgpack.Decoder(list[Pair])


def block_bytes(memory_bytes: int) -> int:
    """How large blocks are, so that those of FAN_IN runs take a quarter of this memory."""
    return max(1 << 12, min(1 << 20, memory_bytes // (4 * FAN_IN)))


def fan_in(memory_bytes: int) -> int:
    return max(16, min(FAN_IN, memory_bytes // (4 * block_bytes(memory_bytes))))


def write_run(folder: Path, name: str, pairs: Iterable[Pair], limit: int) -> SortedRun:
    """Write sorted pairs in blocks that take about `limit` bytes of memory; durable, and whole."""
    path = folder / name
    draft = path.with_name(f".{name}.{os.getpid()}.draft")
    blocks: list[Block] = []
    count = offset = 0
    with draft.open("wb") as file:
        for some, held in cut(pairs, limit):
            data = msgspec.msgpack.encode(some)
            checksum = xxhash.xxh3_64_intdigest(data)
            blocks.append(Block(some[0][0], offset, len(data), held, checksum))
            file.write(data)
            count, offset = count + len(some), offset + len(data)
        file.flush()
        os.fsync(file.fileno())
    draft.rename(path)
    return SortedRun(name, count, blocks)


def cut(pairs: Iterable[Pair], limit: int) -> Iterator[tuple[list[Pair], int]]:
    """Some pairs at a time, and how much memory they take: about `limit`."""
    some: list[Pair] = []
    held = 0
    for pair in pairs:
        some.append(pair)
        held += len(pair[0]) + len(pair[1]) + OVERHEAD
        if held >= limit:
            yield some, held
            some, held = [], 0
    if some:
        yield some, held


def read_run(folder: Path, run: SortedRun) -> Iterator[Pair]:
    # A file is opened for each block: thousands of runs must not need thousands of open files.
    path = folder / run.file
    for block in run.blocks:
        try:
            with path.open("rb", buffering=0) as file:
                data = os.pread(file.fileno(), block.nbytes, block.offset)
        except OSError as error:
            raise DataDamaged(_damaged(path, str(error))) from error
        if xxhash.xxh3_64_intdigest(data) != block.checksum:
            what = f"the {block.nbytes:,} bytes from byte {block.offset:,} differ"
            raise DataDamaged(_damaged(path, what))
        yield from _block.decode(data)


def _damaged(path: Path, what: str) -> str:
    return f"{path} is not what was written: {what}. Delete the unfinished work and start again."


def merged(folder: Path, runs: Sequence[SortedRun]) -> Iterator[Pair]:
    """The pairs of all runs, by key; equal keys in the order of the runs."""
    if len(runs) == 1:
        return read_run(folder, runs[0])
    return merge(*(read_run(folder, run) for run in runs), key=itemgetter(0))


class Sorter:
    """Takes pairs in any order; writes them as runs of about `memory_bytes` each."""

    def __init__(self, folder: Path, name: str, memory_bytes: int) -> None:
        self.folder, self.name, self.memory_bytes = folder, name, memory_bytes
        self.runs: list[SortedRun] = []
        self._pairs: list[Pair] = []
        self._held = 0

    def add(self, key: bytes, value: bytes) -> None:
        self._pairs.append((key, value))
        self._held += len(key) + len(value) + OVERHEAD
        if self._held >= self.memory_bytes // 2:
            self._write()

    def finish(self) -> list[SortedRun]:
        if self._pairs:
            self._write()
        return self.runs

    def _write(self) -> None:
        self._pairs.sort(key=itemgetter(0))
        name = f"{self.name}-{len(self.runs):04}.run"
        limit = block_bytes(self.memory_bytes)
        self.runs.append(write_run(self.folder, name, self._pairs, limit))
        self._pairs, self._held = [], 0


class Range(msgspec.Struct, frozen=True):
    """The pairs with low <= key < high, and the parts of the runs that may hold them."""

    low: bytes
    high: bytes | None
    runs: list[SortedRun]

    def pairs(self, folder: Path) -> Iterator[Pair]:
        for pair in merged(folder, self.runs):
            if pair[0] >= self.low:
                if self.high is not None and pair[0] >= self.high:
                    return
                yield pair


def ranges(runs: Sequence[SortedRun], share_bytes: int) -> list[Range]:
    """Cut all pairs by key, in order, into ranges of about this size; a key is never cut."""
    lows = [b""]
    held = 0
    for block in sorted((b for run in runs for b in run.blocks), key=lambda b: b.first):
        if held >= share_bytes and block.first > lows[-1]:
            lows.append(block.first)
            held = 0
        held += block.held
    firsts = [[block.first for block in run.blocks] for run in runs]
    found: list[Range] = []
    for low, high in zip(lows, [*lows[1:], None], strict=True):
        parts: list[SortedRun] = []
        for run, first in zip(runs, firsts, strict=True):
            # The block before may end with the key itself.
            start = max(0, bisect_left(first, low) - 1)
            stop = len(first) if high is None else bisect_left(first, high)
            if start < stop:
                parts.append(SortedRun(run.file, run.pairs, run.blocks[start:stop]))
        found.append(Range(low, high, parts))
    return found
