# SPDX-License-Identifier: Apache-2.0
"""Shards that were fetched, kept on a local disk under a size limit, for all processes of a host.

Invariants: a file under its name is whole and was right when it came; together with those being
fetched, files never exceed the limit; a file that somebody holds is never dropped. What is dropped
is what was used least recently, and last of all what this host keeps for others.

    FOLDER/1f0c...-train-00003.arrow     named by its content, so data sets can share a folder
    FOLDER/.1f0c...-train-00003.arrow.draft   being fetched; it has its full size from the start
    FOLDER/.locks/                       one empty file per shard: who has it locked fetches it
    FOLDER/.lock                         who has it locked decides what is dropped
    FOLDER/.identity                     by which hosts see whether they share a folder

All locks are flocks: the kernel lets go when a process ends, however it ends. The draft that it
leaves behind is removed by the next one who needs the shard, or the room.
"""

import fcntl
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import BinaryIO
from weakref import WeakSet

import xxhash

from manyhands.data.shards.damaged_blocks import check_blocks
from manyhands.data.shards.manifest import ShardInfo
from manyhands.values.byte_sizes import parse_bytes
from manyhands.values.errors import DataError

PATIENCE_S = 30.0
"""How long a fetch waits for others to let go of files when everything in the cache is in use."""

_OURS = re.compile(r"[0-9a-f]{32}-.*|\.[0-9a-f]{32}-.*\.draft")
"""Nothing else in the folder is counted or dropped: it may be somebody's."""

_IDENTITY = re.compile(r"[0-9a-f]{16}")

ShardFetch = Callable[[BinaryIO], None]
"""Writes the checked bytes of one shard."""


def key_of(info: ShardInfo) -> str:
    """A shard's name by its content, fit to be a file name."""
    content = "\n".join([str(info.nbytes), *info.checksums])
    return f"{xxhash.xxh3_128_hexdigest(content.encode())}-{PurePosixPath(info.file).name[-100:]}"


class Cache:
    """Threads and processes may share one folder. After pickling it, or in a forked process, one
    begins by holding nothing."""

    def __init__(
        self, folder: str | Path, limit: int | str | None = None, patience_s: float = PATIENCE_S
    ) -> None:
        self.folder = Path(folder)
        self.limit = None if limit is None else parse_bytes(limit)
        self.patience_s = patience_s
        self.kept: frozenset[str] = frozenset()
        """Keys of what others count on: they go last."""
        self._mutex = threading.Lock()
        self._held: dict[str, tuple[int, int]] = {}
        """By key: an open file with a shared lock, and how many in this process hold it."""
        self._checked: set[str] = set()
        try:
            (self.folder / ".locks").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(f"the cache folder {self.folder} cannot be made: {error}") from error
        _CACHES.add(self)

    def __reduce__(self) -> tuple[type["Cache"], tuple[Path, int | None, float]]:
        return Cache, (self.folder, self.limit, self.patience_s)

    def hold(self, info: ShardInfo, fetch: ShardFetch) -> Path:
        """The shard's file, fetched where it is not here yet; one process fetches, others wait.

        It stays until as many calls of `release`, or until this process ends."""
        key = key_of(info)
        with self._mutex:
            if key in self._held:
                self._add(key, 1)
                return self.folder / key
        try:
            held = self._open(key, info)
            if held is None:
                held = self._fetch(key, info, fetch)
        except OSError as error:
            if error.errno is None:  # not the disk's, but of whoever fetched
                raise
            raise DataError(
                f"the cache {self.folder} cannot be used: {error.strerror or error}. Make room "
                "there, give it a limit (data.cache_limit) or name another folder (data.cache)."
            ) from error
        with self._mutex:
            if key in self._held:  # another thread was quicker
                os.close(held)
            else:
                self._held[key] = held, 0
            self._add(key, 1)
        return self.folder / key

    def release(self, info: ShardInfo) -> None:
        key = key_of(info)
        with self._mutex:
            if key in self._held:  # else `close` was quicker
                self._add(key, -1)

    def find(self, info: ShardInfo) -> Path | None:
        """The file if it is here; it may go any moment, but what was opened can be read on."""
        path = self.folder / key_of(info)
        with suppress(OSError):
            os.utime(path)  # it is used, though not here
        return path if path.exists() else None

    def identity(self) -> str:
        """The same for all who share this folder, on whichever host, and for nobody else."""
        path = self.folder / ".identity"
        try:
            with _locked(self.folder / ".lock"):
                known = path.read_text() if path.exists() else ""
                if not _IDENTITY.fullmatch(known):  # or half written
                    known = secrets.token_hex(8)
                    path.write_text(known)
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"the cache {self.folder} cannot be used: {error}") from error
        return known

    def close(self) -> None:
        """Let go of everything that this process holds."""
        with self._mutex:
            for held, _ in self._held.values():
                os.close(held)
            self._held.clear()

    def forget(self) -> None:
        """In a forked child: what is held is the parent's, and would never be dropped while the
        child lives."""
        self._mutex = threading.Lock()  # a thread that is not here may have had it
        self.close()

    def _add(self, key: str, users: int) -> None:
        held, count = self._held[key]
        if count + users:
            self._held[key] = held, count + users
        else:
            del self._held[key]
            os.close(held)

    def _open(self, key: str, info: ShardInfo) -> int | None:
        """The file, locked against dropping; None where it is not here, or damaged."""
        path = self.folder / key
        try:
            held = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        fcntl.flock(held, fcntl.LOCK_SH)  # waits only for somebody who is just dropping it
        if _is_at(held, path) and self._is_good(key, held, info):
            with suppress(PermissionError):  # another user's file
                os.utime(held)
            return held
        os.close(held)
        return None

    def _is_good(self, key: str, held: int, info: ShardInfo) -> bool:
        """Read and compared once per process: disks forget, and others may have written here."""
        if os.fstat(held).st_size != info.nbytes:
            return False
        if key not in self._checked and not check_blocks(self.folder / key, info):
            self._checked.add(key)
        return key in self._checked

    def _fetch(self, key: str, info: ShardInfo, fetch: ShardFetch) -> int:
        path, draft = self.folder / key, self.folder / f".{key}.draft"
        with _locked(self.folder / ".locks" / key):
            held = self._open(key, info)  # somebody may have fetched it while we waited
            if held is not None:
                return held
            path.unlink(missing_ok=True)
            held = self._reserve(draft, info)
            try:
                with open(held, "r+b", closefd=False) as file:
                    fetch(file)
                os.fsync(held)
                with _locked(self.folder / ".lock"):  # nobody counts it twice, or not at all
                    os.replace(draft, path)
            except BaseException:
                os.close(held)
                draft.unlink(missing_ok=True)
                raise
            self._checked.add(key)
            return held

    def _reserve(self, draft: Path, info: ShardInfo) -> int:
        """A draft of the full size, locked against dropping from its first moment on."""
        if self.limit is not None and info.nbytes > self.limit:
            raise DataError(
                f"the cache {self.folder} may hold {self.limit:,} bytes, but {info.file} alone has "
                f"{info.nbytes:,}. Raise its limit, or prepare the data with smaller shards."
            )
        give_up = time.monotonic() + self.patience_s
        while True:
            with _locked(self.folder / ".lock"):
                draft.unlink(missing_ok=True)
                missing = self._make_room(info.nbytes)
                if missing <= 0:
                    held = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
                    fcntl.flock(held, fcntl.LOCK_SH)
                    os.ftruncate(held, info.nbytes)
                    return held
            if time.monotonic() >= give_up:
                raise DataError(
                    f"the cache {self.folder} may hold {self.limit:,} bytes, and all of it is in "
                    f"use: {info.file} needs {missing:,} more. Raise its limit, or let fewer "
                    "processes of this host read at a time."
                )
            time.sleep(0.05)

    def _make_room(self, nbytes: int) -> int:
        """Drop what was used least recently; what is kept for others, only when nothing else can
        go. Returns how many bytes are missing then."""
        if self.limit is None:
            return 0
        files = sorted(self._files(), key=lambda file: (file[1].name in self.kept, *file))
        missing = sum(size for _, _, size in files) + nbytes - self.limit
        for _, path, size in files:
            if missing <= 0:
                break
            if self._drop(path):
                missing -= size
        return missing

    def _drop(self, path: Path) -> bool:
        """Unless it is in use. A draft is in use while somebody fetches it."""
        in_use = path
        if path.name.startswith("."):
            in_use = self.folder / ".locks" / path.name[1:].removesuffix(".draft")
        try:
            fd = os.open(in_use, os.O_RDONLY)
        except FileNotFoundError:
            return not path.exists()
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        except BlockingIOError:
            return False
        finally:
            os.close(fd)
        return True

    def _files(self) -> list[tuple[int, Path, int]]:
        """When each was used last, where it is, and its size."""
        found: list[tuple[int, Path, int]] = []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    if _OURS.fullmatch(entry.name):
                        stat = entry.stat()
                        found.append((stat.st_mtime_ns, Path(entry.path), stat.st_size))
        return found


@contextmanager
def _locked(path: Path) -> Generator[None]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _is_at(fd: int, path: Path) -> bool:
    """Whether an open file is still the one at this path."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


_CACHES: WeakSet[Cache] = WeakSet()


def _forget_all() -> None:
    for cache in list(_CACHES):
        cache.forget()


os.register_at_fork(after_in_child=_forget_all)
