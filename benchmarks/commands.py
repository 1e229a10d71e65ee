# SPDX-License-Identifier: Apache-2.0
"""Run a command to its end, watching the memory of all its processes; leave nothing behind.

Memory is the sum of proportional set sizes (a page that n processes share counts 1/n in each), so
memory shared by workers is counted once. Watching is held to a few per cent of one core.
"""

import ctypes
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

SAMPLE_EVERY_S = 0.08
REST = 25
"""After a look at the processes, rest this many times the processor time it took."""


@dataclass(frozen=True, slots=True)
class Ran:
    started: float
    """In seconds since the epoch."""
    peak_memory_bytes: int
    peak_children_bytes: int
    """Of all processes but the first."""


def run(command: Sequence[str], *, variables: Mapping[str, str], timeout_s: float) -> Ran:
    """Raises RuntimeError, with the end of what it printed, when the command fails or is late."""
    seen: set[psutil.Process] = set()
    peak = below = 0
    with tempfile.TemporaryFile("w+") as log:
        started = time.time()
        process = psutil.Popen(
            command,
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            preexec_fn=_die_with_parent,
        )
        try:
            while process.poll() is None and time.time() - started < timeout_s:
                before = time.thread_time()
                alive = _family(process)
                seen.update(alive)
                sizes = [_pss_bytes(p.pid) for p in alive]
                peak, below = max(peak, sum(sizes)), max(below, sum(sizes[1:]))
                took_s = time.thread_time() - before
                with suppress(psutil.TimeoutExpired):
                    process.wait(max(SAMPLE_EVERY_S, REST * took_s))
            code = process.poll()
        finally:
            _end({process, *seen, *_family(process)})
        if code != 0:
            log.seek(0)
            how = f"took more than {timeout_s:.0f} s" if code is None else f"ended with code {code}"
            raise RuntimeError(f"{' '.join(command)}\n{how}:\n{log.read()[-4000:]}")
    return Ran(started, peak, below)


def _family(process: psutil.Process) -> list[psutil.Process]:
    try:
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _pss_bytes(pid: int) -> int:
    with suppress(OSError):  # it has just ended
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def _end(processes: set[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):  # psutil sees to it that the id was not reused
            process.kill()
    psutil.wait_procs(list(processes), timeout=10)


def _die_with_parent() -> None:
    """Linux: a benchmark that is killed takes the command with it."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
