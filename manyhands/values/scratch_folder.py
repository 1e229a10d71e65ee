# SPDX-License-Identifier: Apache-2.0
"""A folder of this process in the temporary directory, removed when it is done with.

A process that is killed leaves its folder behind. While it lives it holds a lock in there, so
others see which ones are nobody's, and sweep them away. That may take a while: whoever has to keep
answering does it before it begins.
"""

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

_PREFIX, _LOCK = "manyhands-", ".lock"


class Scratch:
    def __init__(self, kind: str) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{kind}-"))
        # Locked before it has its name: nobody finds it unlocked.
        unnamed = self.path / f"{_LOCK}-{os.getpid()}"
        self._lock = os.open(unnamed, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unnamed.rename(self.path / _LOCK)

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        with suppress(OSError):  # it was closed before
            os.close(self._lock)
            self._lock = -1


def sweep() -> None:
    """Folders of processes that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # somebody is in it, or it is somebody else's
            lock = os.open(folder / _LOCK, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
