# SPDX-License-Identifier: Apache-2.0
"""The machine: its name, cores and memory, and what of them this process may use."""

import importlib.metadata
import os
import platform
import resource
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

MOST_RANKS = 256
"""For so many workers, and servers, there is room on a host."""


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


class Birth(NamedTuple):
    """What tells a process from a later one that got its number."""

    parent: int
    began: int
    """In ticks of the kernel's clock since the machine was started."""


def birth(pid: int) -> Birth:
    """Of a process; OSError: there is none of that number."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return Birth(int(fields[1]), int(fields[19]))


def processor() -> str:
    """What it calls itself."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return " ".join(value.split())
    except OSError:
        pass
    return platform.machine()


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


def open_files() -> int:
    """File descriptors that this process has open. Looking takes one."""
    try:
        return len(os.listdir("/proc/self/fd")) - 1
    except OSError:
        return most_open_files()


def most_open_files() -> int:
    """How many it may have open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def allow_open_files(wanted: int = 65536) -> int:
    """As many as may be had without asking anybody, for this process and those it starts. No more
    than `wanted`: there are programs that close every number up to the limit when they start."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most_open_files()


def occupy_standard_files() -> None:
    """Nothing that is opened later gets the number of a stdin, stdout or stderr that was closed."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one


def peak_memory_bytes() -> int:
    """The most memory this process ever held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
