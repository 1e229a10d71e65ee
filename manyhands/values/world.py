# SPDX-License-Identifier: Apache-2.0
"""The machine, and this process's place in the run. The only reader of the environment."""

import importlib.metadata
import os
import resource
import socket
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class World:
    """One worker's place: `rank` of `num_ranks`. Rank 0 is the leader; it speaks for all.

    Workers that share memory are on one host and have neighbouring ranks; the first of them speaks
    for the host. Whoever shares memory with nobody counts as a host of its own.
    """

    rank: int
    num_ranks: int
    hosts: tuple[int, ...] = ()
    """How many workers each host has, in the order of ranks; left out: all are on one."""

    def __post_init__(self) -> None:
        if not self.hosts:
            object.__setattr__(self, "hosts", (self.num_ranks,))
        assert sum(self.hosts) == self.num_ranks and 0 <= self.rank < self.num_ranks, self

    @property
    def leads(self) -> bool:
        return self.rank == 0

    @property
    def leads_host(self) -> bool:
        return self.local_rank == 0

    @property
    def num_hosts(self) -> int:
        return len(self.hosts)

    @property
    def host(self) -> int:
        return next(h for h in range(self.num_hosts) if self.rank in self.ranks_of(h))

    @property
    def local_rank(self) -> int:
        return self.rank - self.ranks_of(self.host).start

    @property
    def local_ranks(self) -> int:
        return self.hosts[self.host]

    def ranks_of(self, host: int) -> range:
        first = sum(self.hosts[:host])
        return range(first, first + self.hosts[host])

    def among_hosts(self) -> "World":
        """The world in which each host is one."""
        return World(self.host, self.num_hosts, (1,) * self.num_hosts)


def opponents(world: World) -> list[int | None]:
    """Round by round of a tournament in which everyone meets everyone, each one at a time."""
    last = world.num_ranks - 1 + world.num_ranks % 2
    met: list[int | None] = []
    for turn in range(last):
        if world.rank == last:
            other = turn * (last + 1) // 2 % last
        else:
            other = (turn - world.rank) % last
            other = last if other == world.rank else other
        met.append(other if other < world.num_ranks else None)
    return met


@dataclass(frozen=True, slots=True)
class Machine:
    host: str
    cores: int
    memory_bytes: int


def machine() -> Machine:
    return Machine(socket.gethostname(), usable_cores(), memory_bytes())


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


def user_cache() -> Path:
    """Where this user's programs keep what they can fetch again."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return named if named.is_absolute() else Path.home() / ".cache"


def search_path(path: Sequence[str]) -> None:
    """Find modules as the driver does, where this host has the folders; then as here."""
    theirs = [entry for entry in path if not entry or os.path.exists(entry)]
    sys.path[:] = [*theirs, *(entry for entry in sys.path if entry not in theirs)]


def switched_on(variable: str) -> bool:
    """Whether a variable of the environment says yes."""
    return os.environ.get(variable, "").lower() in ("1", "true")


@contextmanager
def variables(changes: Mapping[str, str | None], also: Sequence[str] = ()) -> Generator[None]:
    """Environment variables for the time being; None takes one away.

    Afterwards they are as before, and so are those in `also`, which a library sets by itself.
    """
    before = {name: os.environ.get(name) for name in (*changes, *also)}
    _set(changes)
    try:
        yield
    finally:
        _set(before)


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
