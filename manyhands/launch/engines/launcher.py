# SPDX-License-Identifier: Apache-2.0
"""What it takes to have live workers: who starts them, and the hosts that they may be on.

Two contracts. A `Launcher` starts processes, says how they ended and kills them. `Hosts` is where
they may be: what there is, what is to be had, who is cut off. A launcher has its hosts; those of a
launcher that knows this host alone are `ThisHost`, which has nothing to do.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from manyhands.launch.engines.fork_agent import WorkerExit, WorkerStarted
from manyhands.values.errors import RequestError
from manyhands.values.machine import Machine, machine, process_began
from manyhands.values.worker_status import HostStatus

WORKER = "manyhands.worker.lifecycle:main"
"""A worker's main, by name: a stage imports no worker."""


@dataclass(frozen=True, slots=True)
class HostNews:
    """A host has come or gone."""

    host: str
    what: str


@dataclass(frozen=True, slots=True)
class LauncherWarning:
    """Something that a person should know."""

    text: str


LauncherEvent = WorkerStarted | WorkerExit | HostNews | LauncherWarning


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """Where a worker is going to be: a host, and what it must know there."""

    at: str
    """Which of the launcher's hosts; "" is the driver's own."""
    fds: tuple[int, int]
    """The memory of that host, as workers there inherit it."""
    address: str = "127.0.0.1"
    """Of that host, for workers of other hosts."""
    driver: str = "127.0.0.1"
    """Of the driver's host."""
    run: str | None = None
    """The run's folder, where that host has another one than the driver."""
    shares: bool = True
    """It sees the driver's own folder."""
    name: str = ""


@dataclass(frozen=True, slots=True)
class LauncherTraits:
    """What never changes about a launcher."""

    listens: str = "127.0.0.1"
    """The address at which the supervisor is to be reached by workers."""
    many_hosts: bool = False
    """Whether workers may be on several hosts."""
    replaceable: bool = True
    """Whether a worker can be killed, and another started in its place."""
    most_workers: int | None = None
    """How many it can start; None: no limit of its own."""


@dataclass(frozen=True, slots=True)
class HostsNow:
    """How the hosts are at this moment."""

    capacity: int | None = None
    """For how many workers there is room; None: for as many as are wanted."""
    count: int = 1
    """On so many hosts."""
    silent_s: Mapping[str, float] = field(default_factory=dict[str, float])
    """For how long hosts have not answered, by `WorkerPlace.at`."""


class Hosts(Protocol):
    """Where workers may be. The driver plans with it, the supervisor looks at it all the time."""

    @property
    def grows(self) -> bool:
        """Whether hosts may join on their own, at any time."""
        ...

    def inventory(self) -> Machine:
        """What there is and what could be had, as one machine."""
        ...

    def reserve(self, least: int, most: int, threads: int = 1) -> None:
        """So many workers are wished for: have room for the least on return, or raise; for the
        most when it can be had."""
        ...

    def load(self, task_bytes: int, run: Path, lease_s: float) -> None:
        """A run begins: so many bytes of the task memory are its task. A host that does not hear
        of us for `lease_s` kills its workers."""
        ...

    def look(self) -> HostsNow: ...

    def drop(self, at: str, because: str) -> None:
        """Give up a host and all workers on it; the launcher's `poll` tells of their end."""
        ...

    def roster(self) -> Mapping[str, HostStatus]:
        """All that are here, by `WorkerPlace.at`; who works there is not known here."""
        ...

    def withdraw(self, name: str) -> str:
        """Drop the hosts of that name for good, also for a resume: they cannot come back. What
        there is to say about it. Raises RequestError when there is none, or when it cannot be."""
        ...


def drivers_own(address: str, slots: int) -> HostStatus:
    """The driver's host, which is there as long as this process is."""
    return HostStatus(machine().host, address, slots, process_began(), "driver")


class ThisHost:
    """No other host: as many workers as are wanted, and nobody to be cut off from."""

    grows = False

    def inventory(self) -> Machine:
        return machine()

    def reserve(self, least: int, most: int, threads: int = 1) -> None: ...

    def load(self, task_bytes: int, run: Path, lease_s: float) -> None: ...

    def look(self) -> HostsNow:
        return HostsNow()

    def drop(self, at: str, because: str) -> None: ...

    def roster(self) -> Mapping[str, HostStatus]:
        return {"": drivers_own("127.0.0.1", machine().cores)}

    def withdraw(self, name: str) -> str:
        raise RequestError(f"this run is on one host alone, {machine().host}: stop it instead.")


class Launcher(Protocol):
    """Starts workers and says how they ended. Only the supervisor calls it while a run goes on.

    `poll` never blocks; `fileno()` becomes readable before it has something to say. A worker that
    was killed counts as dead when `poll` has told of its exit, not before.
    """

    @property
    def traits(self) -> LauncherTraits: ...
    @property
    def hosts(self) -> Hosts: ...

    fds: tuple[int, int]
    """Memory that every worker of this host inherits: of the task, and of the shared state."""

    def start(self, worker: int, orders: Callable[[WorkerPlace], bytes], log: Path) -> WorkerPlace:
        """Choose a place, have the orders written for it, and start a worker there."""
        ...

    def poll(self) -> list[LauncherEvent]:
        """What happened since the last call."""
        ...

    def fileno(self) -> int: ...

    def kill(self, worker: int) -> None:
        """End one worker, however stuck it is."""
        ...

    def stop(self) -> None:
        """End every worker and see it gone; the memory is blank again. May be called twice."""
        ...

    def close(self) -> None:
        """Stop, and give everything back. The launcher cannot be used any more."""
        ...
