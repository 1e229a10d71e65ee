# SPDX-License-Identifier: Apache-2.0
"""What makes a killed preparation go on: `.work` in the folder to be made.

It belongs to one recipe over one set of files; finished tasks in it are kept, so that the same
command goes on where it was interrupted. One process at a time works there.
"""

import fcntl
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from manyhands.data.mapreduce.resumable_tasks import is_full
from manyhands.data.preparing.recipe import refuse_finished
from manyhands.values.errors import DataError, DataTaskFailed
from manyhands.values.run_folder import write_whole

WORK, SPOOL = ".work", "spool"
"""What an iterable gave is written down before it is known whether it belongs to the same work."""
_LOCK, _REFUSED = ".lock", "refused"


@contextmanager
def work_folder(folder: Path, *, restart: bool) -> Generator[Path]:
    """`folder`/.work, for us alone. An attempt that was refused leaves nothing that binds."""
    work, made, ours = folder / WORK, not folder.exists(), False
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
        ours = _is_there(work / _LOCK, lock)
        if not ours:  # who held it before us has removed it
            raise DataError(f"another process was preparing {folder} a moment ago. Try again.")
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
        # Removed while it is ours: who locks it afterwards would lose what it begins.
        if (
            ours
            and made
            and work.is_dir()
            and {p.name for p in work.iterdir()} <= {_LOCK, _REFUSED}
        ):
            shutil.rmtree(work, ignore_errors=True)
            with suppress(OSError):
                folder.rmdir()
        os.close(lock)


def _is_there(path: Path, file: int) -> bool:
    """Whether this open file is still what the path names."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def tidy(folder: Path) -> None:
    """Remove what a finished preparation left when it was killed at the very end."""
    with suppress(OSError):
        lock = os.open(folder / WORK / _LOCK, os.O_RDWR)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder / WORK)
        finally:
            os.close(lock)


def sweep_drafts(folder: Path) -> None:
    """Remove half-written files of processes that were killed, when nobody writes any more."""
    for path in folder.rglob(".*.draft"):
        path.unlink(missing_ok=True)


def _forget(work: Path, *, but: str = "") -> None:
    """Everything but the lock, which we hold."""
    for path in work.iterdir():
        if path.name == but:
            continue
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
        _forget(work, but=SPOOL)
    (work / _REFUSED).unlink(missing_ok=True)
    write_whole(mark, key)
