# SPDX-License-Identifier: Apache-2.0
"""The machine, and this process's place in the run. The only reader of the environment."""

import os
import resource
import socket
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class World:
    """One worker's place: `rank` of `num_ranks`. Rank 0 is the leader; it speaks for all."""

    rank: int
    num_ranks: int

    @property
    def leads(self) -> bool:
        return self.rank == 0


@dataclass(frozen=True, slots=True)
class Machine:
    host: str
    cores: int
    memory_bytes: int


def machine() -> Machine:
    return Machine(socket.gethostname(), usable_cores(), memory_bytes())


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


def agent_environment() -> dict[str, str]:
    """The environment of a host agent and so of its workers.

    malloc is told to keep freed memory: a training step frees and asks again for the same large
    blocks, and returning them to the kernel each time costs page faults (5-10 % of a GPT step).
    """
    tunables = {
        "glibc.malloc.mmap_threshold": 1 << 30,
        "glibc.malloc.trim_threshold": 1 << 32,
    }
    ours = ":".join(f"{name}={value}" for name, value in tunables.items())
    theirs = os.environ.get("GLIBC_TUNABLES")
    # OMP_NUM_THREADS is left alone: train.threads decides, by torch.set_num_threads.
    return {**os.environ, "GLIBC_TUNABLES": f"{ours}:{theirs}" if theirs else ours}
