# SPDX-License-Identifier: Apache-2.0
"""IDX files, the form in which MNIST is given away: images in one file, their labels in another.

A file is two zero bytes, a type, the number of dims, each dim (big-endian, 4 bytes), and the
values. Files whose names differ in `images` and `labels` alone are read side by side. Columns:
`image` (the pixels behind the header of a PGM or PPM file, so that they are an image like any
other) and `label`. A record has the number of its image, in the images' file.

Invariant: a file has the values that its header promises, no fewer and no more; else DataError with
file and byte. There are no bad records.
"""

import math
import os
import re
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pyarrow as pa

from manyhands.data.sources.access.decompress import SUFFIXES
from manyhands.data.sources.access.files import (
    compression_of,
    local_path,
    name_of_file,
    open_bytes,
    read_head,
    read_range,
    shown,
    size_of,
)
from manyhands.data.sources.cutting.source import Chunk, TablePiece, Types
from manyhands.data.sources.values.arrow_casting import piece_of
from manyhands.values.errors import DataError

_TYPES = {8: "u1", 9: "i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}
_MOST_DIMS = 8
_MOST_BYTES = 1 << 30
"""Of an Arrow array of bytes, whose offsets are int32."""
_CHANNELS = {1: b"P5", 3: b"P6"}
_NAMED = re.compile(r"idx\d-(ubyte|byte|short|int|float|double)\b|\.idx\d?(\.|$)")


@dataclass(frozen=True, slots=True)
class IdxHeader:
    type: int
    dims: tuple[int, ...]

    @property
    def records(self) -> int:
        return self.dims[0]

    @property
    def column(self) -> str:
        """What the values are; "" when they are neither images nor labels."""
        if len(self.dims) == 1:
            return "label"
        pixels = len(self.dims) == 3 or (len(self.dims) == 4 and self.dims[3] in _CHANNELS)
        return "image" if pixels and self.type == 8 and all(self.dims[1:]) else ""

    @property
    def record_bytes(self) -> int:
        return math.prod(self.dims[1:]) * np.dtype(_TYPES[self.type]).itemsize

    def byte(self, record: int) -> int:
        """Where a record begins in the (decompressed) file."""
        return 4 + 4 * len(self.dims) + record * self.record_bytes


@dataclass(frozen=True, slots=True)
class Idx:
    urls: tuple[str, ...] = field(repr=False)  # they may hold secrets
    headers: tuple[IdxHeader, ...]
    together: tuple[tuple[int, ...], ...]
    """Files that are read side by side: (images, labels), (images,) or (labels,)."""
    notes: tuple[str, ...] = ()

    @classmethod
    def sniff(cls, urls: Sequence[str]) -> "Idx":
        headers = tuple(map(header_of, urls))
        together = paired(urls, headers)
        notes = [
            f"{shown(urls[a])} has its labels in {name_of_file(urls[b])}"
            for a, b in (group for group in together if len(group) == 2)
        ]
        return cls(tuple(urls), headers, together, tuple(notes))

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(map(shown, self.urls))

    def chunks(self, target_bytes: int) -> list[Chunk]:
        """Compressed files are one chunk: they can be read from their beginning only."""
        found: list[Chunk] = []
        for group in self.together:
            records, size = self.headers[group[0]].records, self._record_bytes(group)
            rows = max(1, target_bytes // size)
            if any(compression_of(self.urls[file]) for file in group):
                rows = max(1, records)
            for first in range(0, max(1, records), rows):
                stop = min(first + rows, records)
                found.append(Chunk(group[0], first, stop, first, (stop - first) * size))
        return found

    def read(self, chunk: Chunk, types: Types, target_bytes: int) -> Iterator[TablePiece]:
        group = next(group for group in self.together if group[0] == chunk.file)
        rows = max(1, min(target_bytes, _MOST_BYTES) // (self._record_bytes(group) + 64))
        with ExitStack() as stack:
            parts = {i: stack.enter_context(_reader(self.urls[i], self.headers[i])) for i in group}
            for first in range(chunk.start, chunk.stop, rows):
                stop = min(first + rows, chunk.stop)
                columns = {
                    self.headers[i].column: self._column(i, read, first, stop)
                    for i, read in parts.items()
                }
                numbers = np.arange(first, stop, dtype=np.int64)
                file = shown(self.urls[chunk.file])
                yield piece_of(pa.table(columns), numbers, file=file, types=types)
            for i, read in parts.items():
                if chunk.stop == self.headers[i].records:
                    _refuse_more(self.urls[i], self.headers[i], read)

    def _record_bytes(self, group: Sequence[int]) -> int:
        return sum(self.headers[file].record_bytes for file in group)

    def _column(self, file: int, read: "_Read", first: int, stop: int) -> pa.Array:
        header = self.headers[file]
        begin, end = header.byte(first), header.byte(stop)
        data = read(begin, end)
        if len(data) < end - begin:
            raise DataError(
                f"{shown(self.urls[file])} is cut off at byte {begin + len(data):,}: its header "
                f"promises {header.records:,} records, which end at byte "
                f"{header.byte(header.records):,}. Fetch it again."
            )
        return _images(header, data) if header.column == "image" else _labels(header, data)


# ---- headers and names


def is_idx(head: bytes) -> bool:
    """Whether a file that begins like this has the header of an IDX file."""
    return not _trouble(head)


def is_named_idx(name: str) -> bool:
    """`train-images-idx3-ubyte.gz`, `t10k-labels.idx1-ubyte`, `a.idx`."""
    return _NAMED.search(name.lower()) is not None


def header_of(url: str) -> IdxHeader:
    head = read_head(url, 4 + 4 * _MOST_DIMS)
    if what := _trouble(head):
        raise DataError(
            f"{shown(url)} is no IDX file: {what}. Such a file begins with two zero bytes, a type "
            "(8, 9, or 11 to 14), the number of dims, and each dim in 4 bytes."
        )
    dims = tuple(np.frombuffer(head, ">u4", head[3], 4).tolist())
    header = IdxHeader(head[2], dims)
    if not header.column:
        size = " x ".join(map(str, dims))
        raise DataError(
            f"{shown(url)} holds {size} values of type {head[2]} (bytes 2 to "
            f"{header.byte(0) - 1}), which are neither images (type 8; records x height x width, "
            "and x 1 or x 3 for channels) nor labels (one dim)."
        )
    return header


def _trouble(head: bytes) -> str:
    """What is wrong with the beginning of a file, and where; "" if nothing is."""
    for byte, good in enumerate(({0}, {0}, _TYPES, range(1, _MOST_DIMS + 1))):
        if byte == len(head):
            return f"it ends at byte {byte}"
        if head[byte] not in good:
            return f"byte {byte} is {head[byte]:#04x}"
    if len(head) < 4 + 4 * head[3]:
        return f"it ends at byte {len(head)}, within its dims"
    return ""


def paired(urls: Sequence[str], headers: Sequence[IdxHeader]) -> tuple[tuple[int, ...], ...]:
    """Which files are read side by side, in the order of the first of each."""
    by_stem: dict[str, dict[tuple[str, str], int]] = {"image": {}, "label": {}}
    for i, (url, header) in enumerate(zip(urls, headers, strict=True)):
        before = by_stem[header.column].setdefault(_stem(url), i)
        if before != i:
            raise DataError(
                f"{shown(urls[before])} and {shown(url)} hold the same {header.column}s, by their "
                "names: the records would be doubled. Give one of them."
            )
    images, labels = by_stem["image"], by_stem["label"]
    if not images or not labels:
        return tuple((i,) for i in range(len(urls)))
    for here, there, what in ((images, labels, "labels"), (labels, images, "images")):
        for stem, i in here.items():
            if stem not in there:
                raise DataError(
                    f"{shown(urls[i])}: its {what} are not among the files. They must be in the "
                    "same folder, in a file of the same name with "
                    f"'{what}' in it (train-images-idx3-ubyte, train-labels-idx1-ubyte)."
                )
    found = [(i, labels[stem]) for stem, i in images.items()]
    for a, b in found:
        if headers[a].records != headers[b].records:
            raise DataError(
                f"{shown(urls[a])} has {headers[a].records:,} images and {shown(urls[b])} "
                f"{headers[b].records:,} labels (bytes 4 to 7 of each): they do not belong "
                "together."
            )
    return tuple(found)


def _stem(url: str) -> tuple[str, str]:
    """The folder and the name, without what tells the files of a pair apart."""
    path = local_path(url)
    folder = (
        shown(url).rpartition("/")[0] if path is None else os.path.dirname(os.path.abspath(path))
    )
    name = name_of_file(url).lower()
    stem, suffix = os.path.splitext(name)
    name = stem if suffix in SUFFIXES else name
    return folder, re.sub(r"idx\d", "idx", re.sub("images?|labels?", "*", name))


# ---- values

_Read = Callable[[int, int], bytes]


@contextmanager
def _reader(url: str, header: IdxHeader) -> Generator[_Read]:
    """Reads bytes [begin, end); of a compressed file, only one stretch after the other, from its
    first record on."""
    if compression_of(url) is None:
        yield partial(read_range, url)
        return
    with open_bytes(url) as file:
        file.read(header.byte(0))
        yield lambda begin, end: file.read(end - begin)


def _refuse_more(url: str, header: IdxHeader, read: _Read) -> None:
    end = header.byte(header.records)
    if read(end, end + 1):
        total = "" if compression_of(url) else f" of {size_of(url):,}"
        raise DataError(
            f"{shown(url)} goes on behind its last record, which ends at byte {end:,}{total}: its "
            f"header promises {header.records:,} records. Fetch it again."
        )


def _images(header: IdxHeader, data: bytes) -> pa.Array:
    _, height, width, *channels = header.dims
    prefix = _CHANNELS[channels[0] if channels else 1] + b" %d %d 255\n" % (width, height)
    pixels = np.frombuffer(data, np.uint8).reshape(-1, header.record_bytes)
    files = np.empty((len(pixels), len(prefix) + header.record_bytes), np.uint8)
    files[:, : len(prefix)] = np.frombuffer(prefix, np.uint8)
    files[:, len(prefix) :] = pixels
    kind = pa.binary(files.shape[1])
    made = pa.FixedSizeBinaryArray.from_buffers(kind, len(files), [None, pa.py_buffer(files)])
    return made.cast(pa.binary())


def _labels(header: IdxHeader, data: bytes) -> pa.Array:
    values = np.frombuffer(data, _TYPES[header.type])
    return pa.array(values.astype(np.float64 if header.type >= 13 else np.int64))
