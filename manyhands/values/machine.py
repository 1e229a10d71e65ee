# SPDX-License-Identifier: Apache-2.0
"""The machine: its name, cores and memory, and what of them this process may use."""

import importlib.metadata
import os
import resource
import socket
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Machine:
    host: str
    cores: int
    memory_bytes: int


def machine() -> Machine:
    return Machine(socket.gethostname(), usable_cores(), memory_bytes())


def process_began() -> float:
    """This process, in seconds since 1970."""
    return os.stat(f"/proc/{os.getpid()}").st_ctime


def torch_version() -> str:
    """Of the torch that would be imported, without importing it."""
    return importlib.metadata.version("torch")


def usable_cores() -> int:
    """Cores this process may run on: affinity, and the container's quota if it is smaller."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass
    return max(1, cores)


def memory_bytes() -> int:
    """Physical memory, or the container's limit if it is smaller."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        return total if limit == "max" else min(total, int(limit))
    except (OSError, ValueError):
        return total


def oom_kills() -> int:
    """How many processes the kernel has killed for want of memory so far."""
    for path, key in (
        ("/sys/fs/cgroup/memory.events", "oom_kill"),
        ("/proc/vmstat", "oom_kill"),
    ):
        try:
            for line in Path(path).read_text().splitlines():
                name, _, count = line.partition(" ")
                if name == key:
                    return int(count)
        except (OSError, ValueError):
            continue
    return 0


def peak_memory_bytes() -> int:
    """The most memory this process ever held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
