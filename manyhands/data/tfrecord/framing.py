# SPDX-License-Identifier: Apache-2.0
"""TFRecord framing: where the records of a file are, whether they are whole, and writing them.

A record is its length (u64, little endian), the masked CRC-32C of those 8 bytes, the data, and the
masked CRC-32C of the data. What is in the data is the business of `parse_examples`.

Invariant: every byte given to `index` is in a record that it returns, or in the one `FrameDamage`
that says from which byte on the rest was given up. Nothing is raised for what a file holds, and
nothing larger than the file is allocated, whatever a length claims.
"""

import struct
from dataclasses import dataclass

import google_crc32c
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from manyhands.data.columns.array_types import ByteArray, Positions

ByteBuffer = ByteArray | bytes | bytearray | memoryview

HEADER = 12
"""Bytes before the data: the length and its checksum."""

FOOTER = 4
"""Bytes after it: the data's checksum."""

_POLYNOMIAL = 0x82F63B78
_MASK_DELTA = 0xA282EAD8

_SMALL = 1024
"""Bytes; smaller records are cut from a copy of them all, which is faster than from an array."""


@dataclass(frozen=True, slots=True)
class FrameDamage:
    """Something wrong, and where: counted from the beginning of the buffer that was looked at."""

    record: int
    byte: int
    """Where the record begins: its header here, its data where records were parsed."""
    what: str
    short: int = 0
    """How many bytes are missing to make the record (or its header) whole, when the buffer just
    ends too early: who reads a file in parts goes on at `byte`. 0 for any other damage."""


def as_bytes(buffer: ByteBuffer) -> ByteArray:
    """The same memory as an array of bytes."""
    return buffer if isinstance(buffer, np.ndarray) else np.frombuffer(buffer, dtype=np.uint8)


def index(buffer: ByteBuffer) -> tuple[Positions, Positions, FrameDamage | None]:
    """Where the data of each record starts, and its length; and what stopped us, if anything did.

    The checksums of all lengths are checked, those of the data are not (see `check`).
    """
    data = as_bytes(buffer)
    headers = _walk(data)
    rows = _rows(data, headers[headers <= data.size - HEADER], HEADER)
    lengths = np.ascontiguousarray(rows[:, :8]).view("<u8").ravel()
    wrong = np.flatnonzero(_masked(_crc_of_8(rows[:, :8])) != _u32(rows[:, 8:]))
    damage = _damage(headers, lengths, wrong, data.size)
    keep = damage.record if damage else len(headers)
    return headers[:keep] + HEADER, lengths[:keep].astype(np.int64), damage


def check(buffer: ByteBuffer, starts: Positions, lengths: Positions) -> Positions:
    """Which of these records have data that does not fit its checksum: indices, ascending."""
    data = as_bytes(buffer)
    stored = _u32(_rows(data, starts + lengths, FOOTER))
    return np.flatnonzero(_masked(_crcs(data, starts, lengths)) != stored)


def frame(payloads: ByteBuffer, starts: Positions, lengths: Positions) -> ByteArray:
    """The records as a TFRecord file holds them, one after another."""
    data = as_bytes(payloads)
    if not len(starts):
        return data[:0]
    headers = np.empty((len(starts), HEADER), dtype=np.uint8)
    headers[:, :8] = lengths.astype("<u8").view(np.uint8).reshape(-1, 8)
    headers[:, 8:] = _masked(_crc_of_8(headers[:, :8])).astype("<u4").view(np.uint8).reshape(-1, 4)
    footers = _masked(_crcs(data, starts, lengths)).astype("<u4").view(np.uint8).reshape(-1, 4)
    if np.array_equal(starts[1:], (starts + lengths)[:-1]):
        inside = large_binary(data, np.append(starts, starts[-1:] + lengths[-1:]))
    else:
        inside = gather(data, starts, lengths)
    return contents(joined([_fixed(headers), inside, _fixed(footers)]))[0]


def gather(data: ByteArray, starts: Positions, lengths: Positions) -> pa.LargeBinaryArray:
    """These stretches of `data`, in this order."""
    ends = starts + lengths
    if (starts[1:] < ends[:-1]).any():
        parts = [data.data[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]
        return large_binary(as_bytes(b"".join(parts)), offsets_of(lengths))
    # Gaps and stretches in turn are an Arrow array over the same memory; every second is wanted.
    edges = np.zeros(2 * len(starts) + 1, dtype=np.int64)
    edges[1::2], edges[2::2] = starts, ends
    edges[0] = edges[1] if len(starts) else 0
    return large_binary(data, edges).take(pa.array(np.arange(1, len(edges), 2)))


def offsets_of(lengths: Positions) -> Positions:
    """Where things of these lengths begin when they stand end to end, and where the last ends."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def joined(pieces: list[pa.LargeBinaryArray]) -> pa.LargeBinaryArray:
    """Row by row, one piece after another."""
    nothing = pa.scalar(b"", pa.large_binary())
    return pc.call_function("binary_join_element_wise", [*pieces, nothing])


def large_binary(data: ByteArray, offsets: Positions) -> pa.LargeBinaryArray:
    """An Arrow array over this memory."""
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.large_binary(), len(offsets) - 1, buffers)


def contents(array: pa.LargeBinaryArray) -> tuple[ByteArray, Positions]:
    """The memory of an Arrow array of bytes and its offsets, counted from the first byte in use."""
    _, edges, data = array.buffers()
    if not len(array):
        return np.empty(0, dtype=np.uint8), np.zeros(1, dtype=np.int64)
    offsets = np.frombuffer(edges, dtype=np.int64)[array.offset : array.offset + len(array) + 1]
    if offsets[-1] == offsets[0]:
        return np.empty(0, dtype=np.uint8), offsets - offsets[0]
    used = np.frombuffer(data, dtype=np.uint8)[offsets[0] : offsets[-1]]
    return used, offsets - offsets[0]


def _walk(data: ByteArray) -> Positions:
    """Where headers begin, as far as lengths can be followed; the last may be cut off."""
    size, at, found = data.size, 0, list[int]()
    view, length_at, overhead = data.data, struct.Struct("<Q").unpack_from, HEADER + FOOTER
    while at < size:
        found.append(at)
        if at > size - HEADER:
            break
        at += length_at(view, at)[0] + overhead
    return np.array(found, dtype=np.int64)


def _damage(
    headers: Positions, lengths: NDArray[np.uint64], wrong: Positions, size: int
) -> FrameDamage | None:
    """The first length that is wrong, or else a last record that is cut off."""
    if wrong.size:
        record = int(wrong[0])
        byte = int(headers[record])
        what = (
            "the checksum of its length is wrong, so where the next record begins is unknown: "
            f"{size - byte:,} bytes to the end are given up"
        )
        return FrameDamage(record, byte, what)
    if not headers.size:
        return None
    record, byte = len(headers) - 1, int(headers[-1])
    rest = size - byte
    if len(lengths) < len(headers):
        what = f"{rest} bytes are left where a header needs {HEADER}"
        return FrameDamage(record, byte, what, HEADER - rest)
    needed = int(lengths[-1]) + HEADER + FOOTER
    if needed <= rest:
        return None
    what = f"it is cut off: {rest:,} bytes are left and it has {needed:,}"
    return FrameDamage(record, byte, what, needed - rest)


def _rows(data: ByteArray, at: Positions, width: int) -> ByteArray:
    """The `width` bytes at each position, as rows."""
    if not at.size:
        return np.empty((0, width), dtype=np.uint8)
    shape = (data.size - width + 1,)
    windows = np.ndarray(shape, dtype=f"V{width}", buffer=data, strides=(1,))
    return windows[at].view(np.uint8).reshape(-1, width)


def _u32(rows: ByteArray) -> NDArray[np.uint32]:
    return np.ascontiguousarray(rows).view("<u4").ravel()


def _fixed(rows: ByteArray) -> pa.LargeBinaryArray:
    offsets = np.arange(len(rows) + 1, dtype=np.int64) * rows.shape[1]
    return large_binary(rows.ravel(), offsets)


def _masked(crc: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """TFRecords store CRCs rotated and shifted, so that data with a CRC in it stays random."""
    return ((crc >> np.uint32(15)) | (crc << np.uint32(17))) + np.uint32(_MASK_DELTA)


def _crcs(data: ByteArray, starts: Positions, lengths: Positions) -> NDArray[np.uint32]:
    """CRC-32C of each stretch."""
    value, found = google_crc32c.value, list[int]()
    for first in range(0, len(starts), 1024):
        begin = starts[first : first + 1024]
        end = begin + lengths[first : first + 1024]
        low, high = int(begin.min()), int(end.max())
        if high - low > _SMALL * len(begin):
            found += [value(data[a:b]) for a, b in zip(begin.tolist(), end.tolist(), strict=True)]
            continue
        copy = data[low:high].tobytes()
        edges = zip((begin - low).tolist(), (end - low).tolist(), strict=True)
        found += [value(copy[a:b]) for a, b in edges]
    return np.array(found, dtype=np.uint32)


def _tables() -> NDArray[np.uint32]:
    """tables[k][b]: what byte b, followed by k zero bytes, does to a CRC-32C."""
    tables = np.empty((8, 256), dtype=np.uint32)
    crc = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        crc = np.where(crc & 1, (crc >> 1) ^ np.uint32(_POLYNOMIAL), crc >> 1)
    tables[0] = crc
    for k in range(1, 8):
        tables[k] = tables[0][tables[k - 1] & 0xFF] ^ (tables[k - 1] >> 8)
    return tables


_TABLES = _tables()


def _crc_of_8(rows: ByteArray) -> NDArray[np.uint32]:
    """CRC-32C of every row of 8 bytes, all at once."""
    crc = np.full(len(rows), 0xFFFFFFFF, dtype=np.uint32)
    for i in range(8):
        start = 0xFF if i < 4 else 0  # a CRC begins with 32 ones
        crc ^= _TABLES[7 - i][rows[:, i] ^ np.uint8(start)]
    return crc
