# SPDX-License-Identifier: Apache-2.0
"""Files wherever they are: local paths and every URL that fsspec knows.

The name of a file is a local path or a URL with everything needed to open it, secrets included; it
is handed from function to function and never printed. `shown` is what people see. All trouble, ours
or a storage library's, becomes a DataError that names the file in that form.

Reading is sequential (`open_bytes`, decompressed), by range (`read_range`) or anywhere
(`open_anywhere`), in bounded memory. Lists of files are sorted: nothing depends on the order in
which a folder is listed.
"""

import glob
import io
import os
import stat
from typing import BinaryIO, cast

from manyhands.data.sources.access import remote_files
from manyhands.data.sources.access.decompress import (
    HEAD_BYTES,
    SUFFIXES,
    Compression,
    Unpacked,
    by_magic,
)
from manyhands.data.sources.access.remote_files import trouble
from manyhands.data.sources.access.url_secrets import is_url, shown
from manyhands.values.errors import DataError

__all__ = [
    "compression_of",
    "expand",
    "expand_folder",
    "is_folder",
    "local_path",
    "name_of_file",
    "open_anywhere",
    "open_bytes",
    "read_head",
    "read_range",
    "shown",
    "size_of",
    "suffix_of",
]

_BUFFER_BYTES = 1 << 20
_NOT_DATA = ("_SUCCESS", "_metadata", "_common_metadata", "Thumbs.db", "desktop.ini")
"""What tools leave beside data; names that begin with a dot are left out too."""


def local_path(url: str) -> str | None:
    """The path of a local file, whether it was given as such or as `file://`; None for others."""
    if not is_url(url) or os.path.lexists(url):
        return os.path.expanduser(url)
    if url.startswith(("file://", "local://")) and "::" not in url:
        return url.partition("://")[2]
    return None


def expand(source: str) -> list[str]:
    """The files that a path, a glob or a folder stands for, sorted."""
    if is_folder(source):
        found = expand_folder(source)[0]
    else:
        path = local_path(source)
        found = _expand_remote(source) if path is None else _expand_local(path)
    if not found:
        raise DataError(f"there is no file at {shown(source)}.")
    return found


def is_folder(source: str) -> bool:
    path = local_path(source)
    if path is not None:
        return os.path.isdir(path)
    with trouble(source):
        return not remote_files.has_magic(source) and remote_files.is_folder(source)


def expand_folder(source: str) -> tuple[list[str], list[str]]:
    """All files below a folder: those that may be data, and those that tools leave beside it."""
    path = local_path(source)
    with trouble(source):
        files = remote_files.below(source) if path is None else _walk(path)
    beside = [f for f in files if _is_beside(f)]
    return [f for f in files if not _is_beside(f)], beside


def name_of_file(url: str) -> str:
    """The last part of a path or of a URL."""
    path = local_path(url)
    return remote_files.last_part(url) if path is None else os.path.basename(path)


def suffix_of(url: str) -> str:
    """`.csv` of `a/B.CSV.gz?token=...`: in lower case, without the suffix of a compression."""
    return _suffixes(url)[0]


def _suffixes(url: str) -> tuple[str, str]:
    """The suffix of the data and that of the compression, each "" where there is none."""
    stem, suffix = os.path.splitext(name_of_file(url).lower())
    return (os.path.splitext(stem)[1], suffix) if suffix in SUFFIXES else (suffix, "")


def size_of(url: str) -> int:
    """Bytes as stored."""
    path = local_path(url)
    with trouble(url):
        size = remote_files.size(url) if path is None else os.stat(path).st_size
    if size is not None:
        return size
    with _open_stored(url) as file:  # a web server that does not say
        return sum(len(block) for block in iter(lambda: file.read(_BUFFER_BYTES), b""))


def compression_of(url: str) -> Compression | None:
    """How a file is compressed. Its first bytes decide: a suffix that says otherwise is refused."""
    with _open_stored(url) as file:
        return _compression(url, file.peek(HEAD_BYTES))


def open_bytes(url: str) -> BinaryIO:
    """The file from its beginning, decompressed. Damaged compression is a DataError on reading."""
    file = _open_stored(url)
    try:
        kind = _compression(url, file.peek(HEAD_BYTES))
    except BaseException:
        file.close()
        raise
    if kind is None:
        return cast(BinaryIO, file)
    return cast(BinaryIO, io.BufferedReader(Unpacked(file, kind, shown(url)), _BUFFER_BYTES))


def read_head(url: str, size: int) -> bytes:
    """The first bytes, decompressed."""
    with open_bytes(url) as file:
        return file.read(size)


def read_range(url: str, start: int, stop: int) -> bytes:
    """Bytes [start, stop) as stored; fewer where the file ends before."""
    path = local_path(url)
    with trouble(url):
        if stop <= start:
            return b""
        return (
            remote_files.read_range(url, start, stop) if path is None else _pread(path, start, stop)
        )


def open_anywhere(url: str) -> BinaryIO:
    """The file as stored, seekable. What goes wrong while reading is the reader's to name."""
    path = local_path(url)
    with trouble(url):
        if path is None:
            return remote_files.open_anywhere(url)
        _must_be_regular(path)
        return open(path, "rb")


class _StoredFile(io.RawIOBase):
    """A file as stored. What goes wrong while reading is named like what goes wrong on opening."""

    def __init__(self, url: str) -> None:
        path = local_path(url)
        self._url, self._file = url, cast(BinaryIO, io.BytesIO())
        with trouble(url):
            if path is None:
                self._file = remote_files.open_stream(url)
            else:
                _must_be_regular(path)
                self._file = cast(BinaryIO, io.FileIO(path))

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview, /) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        with trouble(self._url):
            block = self._file.read(len(buffer))
        buffer[: len(block)] = block
        return len(block)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


def _open_stored(url: str) -> io.BufferedReader:
    return io.BufferedReader(_StoredFile(url), _BUFFER_BYTES)


def _compression(url: str, head: bytes) -> Compression | None:
    kind = by_magic(head)
    suffix = _suffixes(url)[1]
    if kind is None and suffix:
        raise DataError(
            f"{shown(url)} is named {suffix} but is no {SUFFIXES[suffix]} data (it begins with "
            f"{head[:8]!r}): it is damaged, or the suffix is wrong. Fetch it again or rename it."
        )
    return kind


def _expand_local(path: str) -> list[str]:
    if os.path.lexists(path):
        with trouble(path):
            _must_be_regular(path)
        return [path]
    if not glob.has_magic(path):
        return []
    found = sorted(glob.glob(path, recursive=True))
    return [name for name in found if os.path.isfile(name) and not _is_beside(name)]


def _expand_remote(url: str) -> list[str]:
    with trouble(url):
        if remote_files.has_magic(url):
            return [name for name in remote_files.matching(url) if not _is_beside(name)]
        return [url] if remote_files.exists(url) else []


def _walk(root: str) -> list[str]:
    found: list[str] = []
    seen: set[str] = set()
    for folder, folders, files in os.walk(root, onerror=_raise, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:  # a link that leads back
            folders.clear()
            continue
        seen.add(real)
        found += [os.path.join(folder, name) for name in files]
    return sorted(found)


def _raise(error: OSError) -> None:
    raise error


def _is_beside(url: str) -> bool:
    name = name_of_file(url)
    return name.startswith(".") or name in _NOT_DATA


def _must_be_regular(path: str) -> None:
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(path)
    if not stat.S_ISREG(mode):
        raise DataError(
            f"{shown(path)} is not a file (a pipe or a device?): data is read more than once, so "
            "write it to a file first."
        )


def _pread(path: str, start: int, stop: int) -> bytes:
    parts: list[bytes] = []
    with io.FileIO(path) as file:
        while start < stop and (part := os.pread(file.fileno(), stop - start, start)):
            parts.append(part)
            start += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)
