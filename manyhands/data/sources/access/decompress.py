# SPDX-License-Identifier: Apache-2.0
"""Compressed files as the bytes they were made from, in bounded memory.

Nothing is dropped silently: a stream that ends early, a checksum that does not fit and bytes after
the end that are not another member are all a DataError with the file and the byte that was reached.
"""

import bz2
import io
import lzma
import zlib
from collections.abc import Iterator
from typing import Literal, Protocol

import google_crc32c
import pyarrow as pa

from manyhands.values.errors import DataError

Compression = Literal["gzip", "zstd", "bz2", "xz"]

SUFFIXES: dict[str, Compression] = {
    ".gz": "gzip",
    ".gzip": "gzip",
    ".zst": "zstd",
    ".zstd": "zstd",
    ".bz2": "bz2",
    ".xz": "xz",
}

_MAGIC: dict[Compression, tuple[bytes, ...]] = {
    "gzip": (b"\x1f\x8b\x08",),
    # A frame, or a skippable frame before the first one.
    "zstd": (b"\x28\xb5\x2f\xfd", *(bytes([0x50 + i]) + b"\x2a\x4d\x18" for i in range(16))),
    "bz2": tuple(b"BZh%d" % n + m for n in range(1, 10) for m in (b"1AY&SY", b"\x17rE8P\x90")),
    "xz": (b"\xfd7zXZ\x00",),
}

_UNPACK: dict[Compression, str] = {
    "gzip": "gzip -dc FILE > NEW",
    "zstd": "zstd -dc FILE > NEW",
    "bz2": "bzip2 -dc FILE > NEW",
    "xz": "xz -dc FILE > NEW",
}

HEAD_BYTES = 16
"""How much of a file `by_magic` wants to see."""

_BLOCK_BYTES = 1 << 16
_OUT_BYTES = 1 << 20


class _CountedBytes(io.RawIOBase):
    """The compressed bytes, counted."""

    def __init__(self, file: io.BufferedReader) -> None:
        self._file, self.reached = file, 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        block = self._file.read(size)
        self.reached += len(block)
        return block

    def close(self) -> None:
        self._file.close()
        super().close()


class _Decompressor(Protocol):
    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, /, max_length: int) -> bytes: ...


def is_tfrecord(head: bytes) -> bool:
    """Whether a file begins with the header of a TFRecord: 8 bytes of length and their checksum."""
    if len(head) < 12:
        return False
    crc = google_crc32c.value(head[:8])
    masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
    return masked == int.from_bytes(head[8:12], "little")


def by_magic(head: bytes) -> Compression | None:
    """What the first bytes of a file say."""
    if is_tfrecord(head):  # one of 559,903 bytes begins like gzip
        return None
    for kind, starts in _MAGIC.items():
        if head.startswith(starts):
            return kind
    return None


class Unpacked(io.RawIOBase):
    """The decompressed bytes of a stored file, from its beginning to its end."""

    def __init__(self, file: io.BufferedReader, kind: Compression, name: str) -> None:
        self._stored, self._name = _CountedBytes(file), name
        self._kind: Compression = kind
        self._blocks = _zstd(self._stored) if kind == "zstd" else _members(self._stored, kind)
        self._block = memoryview(b"")
        self._given = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview, /) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        while not self._block:
            block = self._next()
            if block is None:
                return 0
            if not self._given:
                _refuse_twice(block, self._kind, self._name)
            self._block = memoryview(block)
        size = min(len(buffer), len(self._block))
        buffer[:size] = self._block[:size]
        self._block = self._block[size:]
        self._given += size
        return size

    def _next(self) -> bytes | None:
        try:
            return next(self._blocks, None)
        except DataError:
            raise
        except (EOFError, OSError, ValueError, zlib.error, lzma.LZMAError, pa.ArrowException) as e:
            raise DataError(
                f"{self._name}: the {self._kind} data is {_trouble(e)} near byte "
                f"{self._stored.reached:,} of the file ({self._given:,} bytes of content came "
                "before). Fetch or compress the file again."
            ) from None

    def close(self) -> None:
        self._blocks, self._block = iter(()), memoryview(b"")
        self._stored.close()
        super().close()


def _refuse_twice(head: bytes, kind: Compression, name: str) -> None:
    """Content that is compressed again is no data of ours, and nobody meant it to be."""
    if inside := by_magic(head):
        raise DataError(
            f"{name} is compressed twice: its content, from byte 0 on, is {inside} data inside "
            f"{kind} data. Unpack it once ({_UNPACK[kind]}) and give what comes out."
        )


def _trouble(error: Exception) -> str:
    text = str(error).removeprefix("Error -3 while decompressing data: ")
    ended = isinstance(error, EOFError) or "truncated" in text.lower()
    return "cut off" if ended else f"damaged ({text})"


class _Gzip:
    """zlib behind the interface that bz2 and lzma share."""

    def __init__(self) -> None:
        self._inner = zlib.decompressobj(wbits=31)
        self.needs_input = True

    @property
    def eof(self) -> bool:
        return self._inner.eof

    @property
    def unused_data(self) -> bytes:
        return self._inner.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        out = self._inner.decompress(self._inner.unconsumed_tail + data, max_length)
        self.needs_input = not self._inner.unconsumed_tail and len(out) < max_length
        return out


def _new(kind: Compression) -> _Decompressor:
    if kind == "gzip":
        return _Gzip()
    if kind == "bz2":
        return bz2.BZ2Decompressor()
    return lzma.LZMADecompressor(lzma.FORMAT_XZ)


def _members(stored: _CountedBytes, kind: Compression) -> Iterator[bytes]:
    """One member after the other: gzip, bz2 and xz files may be joined end to end."""
    data = stored.read(_BLOCK_BYTES)
    while data:
        member = _new(kind)
        out = member.decompress(data, max_length=_OUT_BYTES)
        while not member.eof:
            yield out
            data = stored.read(_BLOCK_BYTES) if member.needs_input else b""
            if not data and member.needs_input:
                raise EOFError
            out = member.decompress(data, max_length=_OUT_BYTES)
        yield out
        data = member.unused_data.lstrip(b"\0")  # tapes and some tools pad with zeros
        while not data and (block := stored.read(_BLOCK_BYTES)):
            data = block.lstrip(b"\0")


def _zstd(stored: _CountedBytes) -> Iterator[bytes]:
    with pa.CompressedInputStream(pa.PythonFile(stored, mode="r"), "zstd") as stream:
        while block := stream.read(_OUT_BYTES):
            yield block
