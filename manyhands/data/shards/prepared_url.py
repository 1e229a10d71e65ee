# SPDX-License-Identifier: Apache-2.0
"""Prepared folders behind URLs, beside those that are local paths.

A `RemoteFolder` stands where a Path stands: `/` names what is in it, and printing it shows no
secrets. fsspec is loaded when something is read, not before. A file is read from its beginning to
its end, in blocks and bounded memory; every trouble is a DataError or an OSError without secrets.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from manyhands.data.sources.access.url_secrets import is_url, shown
from manyhands.values.errors import DataError

_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, repr=False)
class RemoteFolder:
    url: str
    """With everything needed to open it, secrets included."""

    def __truediv__(self, name: str) -> "RemoteFolder":
        return RemoteFolder(join(self.url, name))

    def __str__(self) -> str:
        return shown(self.url)

    def __repr__(self) -> str:
        return f"RemoteFolder({str(self)!r})"

    def read(self, name: str) -> bytes:
        """The whole of a small file."""
        return b"".join(blocks_of(join(self.url, name), _BLOCK_BYTES))


FolderOrUrl = Path | RemoteFolder
"""Where a prepared data set is."""


def folder_of(given: str | Path) -> FolderOrUrl:
    """A path, as it is or as `file://`, or a folder behind a URL."""
    if isinstance(given, Path) or not is_url(given):
        return Path(given)
    from manyhands.data.sources.access.files import local_path

    local = local_path(given)
    return RemoteFolder(given) if local is None else Path(local)


def join(url: str, file: str) -> str:
    """The URL of a file in a folder; the query of a web address stays at the end."""
    folder, mark, query = url, "", ""
    if url.rpartition("::")[2].startswith(("http://", "https://")):
        folder, mark, query = url.partition("?")
    return f"{folder.rstrip('/')}/{inside(file)}{mark}{query}"


def inside(file: str) -> PurePosixPath:
    """A manifest may come from anybody; it must not lead out of its folder."""
    path = PurePosixPath(file)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise DataError(f"the manifest lists '{file}', which is not in its own folder.")
    return path


def blocks_of(url: str, block_bytes: int, first: int = 0) -> Iterator[bytes]:
    """A file's blocks from number `first` on, each of them full but the last; in one request where
    that is the whole file."""
    from manyhands.data.sources.access.remote_files import said

    try:
        with _opened(url, first * block_bytes) as file:
            while block := _full(file, block_bytes):
                yield block
    except DataError as error:
        raise DataError(_reason(error, url)) from None
    except Exception as error:  # storage libraries raise what they like, with secrets in it
        raise OSError(said(error, url)) from None


def _opened(url: str, start: int) -> BinaryIO:
    from manyhands.data.sources.access import files, remote_files

    if start == 0 and files.local_path(url) is None:
        with remote_files.trouble(url):
            return remote_files.open_stream(url)
    file = files.open_anywhere(url)
    file.seek(start)
    return file


def _full(file: BinaryIO, size: int) -> bytes:
    """Streams give what has arrived, which may be less than was asked for."""
    parts: list[bytes] = []
    while size and (part := file.read(size)):
        parts.append(part)
        size -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _reason(error: DataError, url: str) -> str:
    """fsspec calls a file of a server that is down missing; what it was is in the cause."""
    from manyhands.data.sources.access.remote_files import said

    missing = error.__context__
    cause = missing.__cause__ if isinstance(missing, FileNotFoundError) else None
    answered = isinstance(cause, LookupError) or getattr(cause, "status", None) == 404
    if cause is None or answered:  # it is missing indeed
        return str(error)
    return f"{shown(url)} cannot be read: {said(cause, url)}"
