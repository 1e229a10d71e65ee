# SPDX-License-Identifier: Apache-2.0
"""Where a preparation is made: its work folder, its crew, and what people see of it.

The work folder is `.work` in the folder to be made. It belongs to one recipe over one set of files;
finished tasks in it are kept, so that the same command goes on where it was interrupted. One
process at a time works there.
"""

import fcntl
import os
import shutil
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from manyhands.data.mapreduce.resumable_tasks import Crew, PhaseProgress, is_full
from manyhands.data.preparing.recipe import Recipe, refuse_finished
from manyhands.values.errors import DataError, DataTaskFailed
from manyhands.values.rundir import write_whole
from manyhands.values.wrapping import wrapped

WORK = ".work"
_LOCK, _REFUSED = ".lock", "refused"
_MEMORY_PARTS = 16
"""A chunk of raw data is at most this part of a worker's memory: parsing takes several times it."""
_DATA_PARTS, _LEAST_BYTES = 256, 4 << 20
"""... and of all data, so that there is something to do for everybody."""


@dataclass(frozen=True, slots=True)
class Preparation:
    folder: Path
    recipe: Recipe
    crew: Crew
    memory: int
    """For each worker."""
    target_bytes: int
    """Of raw data, for a task."""
    key: str
    """Of the recipe and the files: checkpoints of another key are not used."""
    quiet: bool = False
    notes: list[str] = field(default_factory=list[str])

    @property
    def work(self) -> Path:
        return self.folder / WORK

    def note(self, text: str) -> None:
        """Something people should know; said once, whoever asks for it again."""
        if text not in self.notes:
            self.notes.append(text)
            if not self.quiet:
                print(wrapped(text), file=sys.stderr)


def target_bytes(memory: int, total: int | None = None) -> int:
    """How much raw data a task reads. The number of workers must not matter: it may change before
    an interrupted preparation goes on."""
    most = max(1 << 16, memory // _MEMORY_PARTS)
    return most if total is None else min(most, max(_LEAST_BYTES, total // _DATA_PARTS))


@contextmanager
def work_folder(folder: Path, *, restart: bool) -> Generator[Path]:
    """`folder`/.work, for us alone. An attempt that was refused leaves nothing that binds."""
    work, made = folder / WORK, not folder.exists()
    try:
        work.mkdir(parents=True, exist_ok=True)
        lock = os.open(work / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
    except OSError as error:
        kind = DataTaskFailed if is_full(error) else DataError
        raise kind(f"{folder} cannot be made: {error.strerror}.") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(f"another process is preparing {folder} right now.") from None
        refuse_finished(folder)  # somebody may have finished it just now
        if restart:
            _forget(work)
        try:
            yield work
        except DataError:
            with suppress(OSError):  # a full disk is what it may be about
                (work / _REFUSED).touch()
            raise
    finally:
        os.close(lock)
        if made and work.is_dir() and {p.name for p in work.iterdir()} <= {_LOCK, _REFUSED}:
            shutil.rmtree(work, ignore_errors=True)
            with suppress(OSError):
                folder.rmdir()


def tidy(folder: Path) -> None:
    """Remove what a finished preparation left when it was killed at the very end."""
    with suppress(OSError):
        lock = os.open(folder / WORK / _LOCK, os.O_RDWR)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder / WORK)
        finally:
            os.close(lock)


def _forget(work: Path) -> None:
    """Everything but the lock, which we hold."""
    for path in work.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != _LOCK:
            path.unlink()


def claim(work: Path, key: str, folder: Path) -> None:
    """See that what is in the work folder was begun under the same key; or was refused."""
    mark = work / "key"
    if mark.exists() and mark.read_text() != key:
        if not (work / _REFUSED).exists():
            raise DataError(
                f"{folder} holds an interrupted preparation with other settings, or of files that "
                "have changed since. Give the same command again to finish it, or --restart to "
                "forget it."
            )
        _forget(work)
    (work / _REFUSED).unlink(missing_ok=True)
    write_whole(mark, key)


@contextmanager
def bars(*, quiet: bool) -> Generator["Bars | None"]:
    """A bar for each phase, on a terminal; lines where nobody watches."""
    if quiet:
        yield None
        return
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description:<10}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=console, disable=not console.is_terminal) as bar:
        yield Bars(bar)


class Bars:
    def __init__(self, bar: Bar) -> None:
        self.bar, self.phase, self.task = bar, "", None

    def __call__(self, now: PhaseProgress) -> None:
        if now.phase != self.phase:
            self.phase, self.task = now.phase, self.bar.add_task(now.phase, total=now.total)
        if self.task is not None:
            self.bar.update(self.task, completed=now.done)
