# SPDX-License-Identifier: Apache-2.0
"""Files that travel with a run: after the task, in the same memory, as a tar.

A host daemon unpacks them into a folder of their own, which is then the current directory of
workers there; so a relative path means the same as on the driver's host.
"""

import os
import tarfile
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

from manyhands.values.errors import RequestError
from manyhands.values.scratch_folder import Scratch

MOST_BYTES = 1 << 30


def refuse_missing(paths: Iterable[Path]) -> None:
    for path in paths:
        if not path.exists():
            raise RequestError(f"--ship {path}: there is no such file or folder.")


def pack_files(paths: Sequence[Path], fd: int, at: int) -> int:
    """Write them at this offset; where they end."""
    if not paths:
        return at
    refuse_missing(paths)
    names = {_name(path): path for path in paths}
    if len(names) < len(paths):
        raise RequestError("--ship: two of the paths would have the same name on other hosts.")
    if (size := sum(_size(path) for path in paths)) > MOST_BYTES:
        raise RequestError(
            f"--ship: {size / 1e9:.1f} GB are too much to send to every host (at most "
            f"{MOST_BYTES / 1e9:.1f} GB). Put large data on a file system that all hosts see, or "
            "make a prepared folder of it, which hosts fetch in parts: docs/data.md."
        )
    with os.fdopen(os.dup(fd), "wb") as file:
        file.seek(at)
        with tarfile.open(fileobj=file, mode="w") as tar:
            for name, path in names.items():
                tar.add(path.resolve(), arcname=name)
        return file.tell()


def _name(path: Path) -> str:
    """As seen from the current directory; what lies outside of it loses its folders."""
    whole, here = path.absolute().resolve(), Path.cwd().resolve()
    return str(whole.relative_to(here)) if whole.is_relative_to(here) else whole.name


def _size(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


class Unpacking:
    """Of what lies there, in a thread: a host daemon must not stop answering meanwhile."""

    def __init__(self, fd: int, start: int, end: int) -> None:
        self.scratch = Scratch("ship")
        self.folder = self.scratch.path / "files"
        self.folder.mkdir()
        self.fd, self.start, self.end = fd, start, end
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._unpack, name="unpacking", daemon=True)
        self.thread.start()

    def _unpack(self) -> None:
        try:
            # A file description of its own: the offset of a dup would be everybody's.
            with open(f"/proc/self/fd/{self.fd}", "rb") as file:
                file.seek(self.start)
                with tarfile.open(fileobj=file, mode="r|") as tar:
                    tar.extractall(self.folder, filter="data")
        except (OSError, tarfile.TarError) as error:
            self.error = error

    def done(self) -> bool:
        """Raises what went wrong."""
        if self.thread.is_alive():
            return False
        if self.error is not None:
            raise RequestError(f"what was shipped cannot be unpacked here: {self.error}")
        return True
