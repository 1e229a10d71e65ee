# SPDX-License-Identifier: Apache-2.0
"""Files behind URLs, as fsspec reaches them.

fsspec loads the package of a protocol when it is first used; where it is missing, a DataError has
the line that installs it. Whatever a storage library raises becomes a DataError without secrets.
Web servers are special: some have no ranges, folders are pages of links, and `?` begins a query.
"""

import glob
import io
import os
import re
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, BinaryIO, cast

from fsspec.core import url_to_fs
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractFileSystem

from manyhands.data.sources.access.url_secrets import hide, protocols, shown
from manyhands.values.errors import DataError

PACKAGES = {
    "abfs": "adlfs",
    "abfss": "adlfs",
    "az": "adlfs",
    "gcs": "gcsfs",
    "gs": "gcsfs",
    "hf": "huggingface_hub",
    "http": "aiohttp",
    "https": "aiohttp",
    "s3": "s3fs",
    "s3a": "s3fs",
    "sftp": "paramiko",
    "smb": "smbprotocol",
    "ssh": "paramiko",
    "webdav": "webdav4",
    "webhdfs": "requests",
}
"""What to install for a protocol."""

BLOCK_BYTES = 1 << 20

_IDENTITY = {"headers": {"Accept-Encoding": "identity"}}
"""A web server must send the file's own bytes, not squeeze them on the way."""


@contextmanager
def trouble(url: str) -> Generator[None]:
    """Storage libraries raise whatever they like, with the whole URL in it."""
    try:
        yield
    except DataError:
        raise
    except FileNotFoundError:
        raise DataError(f"there is no file at {shown(url)}.") from None
    except IsADirectoryError:
        raise DataError(f"{shown(url)} is a folder, not a file.") from None
    except PermissionError:
        raise DataError(f"{shown(url)} may not be read (permission denied).") from None
    except ImportError as error:
        raise DataError(_missing_package(url, error)) from None
    except Exception as error:
        raise DataError(f"{shown(url)} cannot be read: {said(error, url)}") from None


def said(error: BaseException, url: str) -> str:
    """What a library says about a file: the first line of it, without secrets."""
    text = hide(str(error), url).strip().partition("\n")[0]
    return text[:300] or type(error).__name__


def _missing_package(url: str, error: ImportError) -> str:
    needed = sorted({PACKAGES[p] for p in protocols(url) if p in PACKAGES})
    cure = f"pip install {' '.join(needed)}" if needed else hide(str(error), url)
    return f"{shown(url)} needs a package that is not installed: {cure}"


def own_link(url: str) -> str:
    """The link of a chain that has the path: not `simplecache`, which takes the next one's."""
    links = url.split("::")
    return next((link for link in links if link.partition("://")[2]), links[-1])


def has_magic(url: str) -> bool:
    link = own_link(url)
    return any(c in link.partition("?")[0] for c in "*[") if _is_web(link) else glob.has_magic(link)


def last_part(url: str) -> str:
    link = own_link(url)
    path = re.split("[?#]", link)[0] if _is_web(link) else link
    return path.partition("://")[2].rstrip("/").rpartition("/")[2]


def exists(url: str) -> bool:
    fs, inner = _filesystem(url)
    return bool(fs.exists(inner))


def is_folder(url: str) -> bool:
    fs, inner = _filesystem(url)
    if _is_web(url):  # every page with links could be one
        return url.partition("?")[0].endswith("/")
    return bool(fs.isdir(inner))


def matching(url: str) -> list[str]:
    """The files that a glob finds."""
    fs, inner = _filesystem(url)
    found = cast(dict[str, dict[str, Any]], fs.glob(inner, detail=True))
    names = [name for name, info in found.items() if info["type"] == "file"]
    return sorted(_full(fs, url, inner, name) for name in names)


def below(url: str) -> list[str]:
    """The files in a folder and its sub-folders; of a web server, those its page links to."""
    fs, inner = _filesystem(url)
    if _is_web(url):
        links = [str(link) for link in fs.ls(inner, detail=False)]
        names = [link for link in links if not re.search("[?#]|/$", link)]
    else:
        names = [str(name) for name in fs.find(inner)]
    return sorted(_full(fs, url, inner, name) for name in names)


def size(url: str) -> int | None:
    fs, inner = _filesystem(url)
    known = fs.info(inner).get("size")
    return None if known is None else int(known)


def open_stream(url: str) -> BinaryIO:
    """To be read from the beginning, once."""
    fs, inner = _filesystem(url)
    if isinstance(fs, MemoryFileSystem):  # its files share one position between all who read
        return io.BytesIO(fs.cat_file(inner))
    if _is_web(url):
        return cast(BinaryIO, fs.open(inner, "rb", block_size=0, **_IDENTITY))
    return cast(BinaryIO, fs.open(inner, "rb"))


def open_anywhere(url: str) -> BinaryIO:
    """Seekable. From a web server without ranges it is copied to disk first."""
    fs, inner = _filesystem(url)
    if isinstance(fs, MemoryFileSystem):
        return io.BytesIO(fs.cat_file(inner))
    if not _is_web(url):
        return cast(BinaryIO, fs.open(inner, "rb"))
    file = _open_ranges(fs, inner, cache_type="readahead")
    try:
        file.seek(max(0, (size(url) or 0) - 1))
        file.read(1)
        file.seek(0)
        return file
    except ValueError:
        file.close()
    with open_stream(url) as stream:
        return _copied(stream)


def read_range(url: str, start: int, stop: int) -> bytes:
    fs, inner = _filesystem(url)
    if not _is_web(url):
        return cast(bytes, fs.cat_file(inner, start=start, end=stop))
    known = size(url)
    stop = stop if known is None else min(stop, known)
    if stop <= start:
        return b""
    try:
        with _open_ranges(fs, inner, cache_type="none") as file:
            file.seek(start)
            return file.read(stop - start)
    except ValueError:  # no ranges: read until there
        with open_stream(url) as stream:
            return _after(stream, start, stop - start)


def _after(stream: BinaryIO, skip: int, wanted: int) -> bytes:
    while skip and (block := stream.read(min(skip, BLOCK_BYTES))):
        skip -= len(block)
    parts: list[bytes] = []
    while wanted and (block := stream.read(min(wanted, BLOCK_BYTES))):
        parts.append(block)
        wanted -= len(block)
    return b"".join(parts)


def _copied(stream: BinaryIO) -> BinaryIO:
    fd, path = tempfile.mkstemp()
    copy = os.fdopen(fd, "w+b")
    os.unlink(path)  # it goes when it is closed
    shutil.copyfileobj(stream, copy, BLOCK_BYTES)
    copy.seek(0)
    return cast(BinaryIO, copy)


def _open_ranges(fs: AbstractFileSystem, inner: str, cache_type: str) -> Any:
    return fs.open(inner, "rb", block_size=BLOCK_BYTES, cache_type=cache_type, **_IDENTITY)


def _filesystem(url: str) -> tuple[AbstractFileSystem, str]:
    return url_to_fs(url)


def _is_web(url: str) -> bool:
    return url.startswith(("http://", "https://"))


def _full(fs: AbstractFileSystem, url: str, inner: str, name: str) -> str:
    """What a listing calls `name`, as a URL that opens: with the host, the user, the chain."""
    link, inner = own_link(url), inner.rstrip("/")
    bare = link.rstrip("/")
    known = bare.endswith(inner)
    mine = bare.removesuffix(inner) + name if known else fs.unstrip_protocol(name)
    return url.replace(link, mine, 1)
