# SPDX-License-Identifier: Apache-2.0
"""A command in a session of its own, of which nothing stays behind.

Launchers put workers into sessions of their own, and daemons leave their parents (Ray does both).
So orphans are made to come back to this process, and all that descend from it are ended.
"""

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from recovery_peers.diary import die_with_parent

_PR_SET_CHILD_SUBREAPER = 36


@contextmanager
def running(
    command: Sequence[str], variables: Mapping[str, str], log: Path
) -> Generator[psutil.Popen]:
    """In a session of its own; whatever it has started is gone afterwards, or this raises."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    with open(log, "w") as file:
        process = psutil.Popen(
            command,
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        end_all()


def end_all(timeout_s: float = 20) -> None:
    """Nothing but the contestant is a child of this process, or of one of its children."""
    deadline = time.monotonic() + timeout_s
    while family := psutil.Process().children(recursive=True):
        if time.monotonic() > deadline:
            raise RuntimeError(f"these do not end: {family}")
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(family, timeout=1)
