# SPDX-License-Identifier: Apache-2.0
"""Ways to have live workers: processes of this host, or a thread of this process."""

import importlib
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from manyhands.launch.engines.agent import (
    MAX_MESSAGE,
    AgentUnable,
    KillWorker,
    StartWorker,
    WorkerExit,
    WorkerStarted,
    decode_from_agent,
    encode,
)
from manyhands.values.errors import RequestError
from manyhands.values.world import Machine, agent_environment, machine


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

AGENT = "manyhands.launch.engines.agent"
WORKER = "manyhands.worker.lifecycle:main"
"""A worker's main, by name: this module knows no story."""

RESERVED_BYTES = 1 << 46
"""The (sparse) size of a shared segment; only pages that are written to take memory."""


def create_segments() -> tuple[int, int]:
    """Memory of the task and of the state: memfds, which vanish with their last holder."""
    fds = os.memfd_create("manyhands-task"), os.memfd_create("manyhands-state")
    for fd in fds:
        os.ftruncate(fd, RESERVED_BYTES)
    return fds


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


class Launcher(Protocol):
    """Starts workers and says how they ended. Only the supervisor calls it."""

    fds: tuple[int, int]
    """Memory that every worker inherits: of the task, and of the shared state."""
    most_workers: int | None
    """How many it can start; None: no limit of its own."""
    born: float
    """When it was constructed: the first thing that a command does."""
    used: bool
    """Whether it has started a worker before."""
    listens: str
    """The address at which the supervisor is to be reached by workers."""
    many: bool
    """Whether workers may be on several hosts."""
    replaceable: bool
    """Whether a worker can be killed, and another started in its place."""

    @property
    def grows(self) -> bool:
        """Whether hosts may join on their own, at any time."""
        ...

    def inventory(self) -> Machine: ...

    def reserve(self, least: int, most: int, threads: int) -> None:
        """So many workers are planned: have room for the least, or raise."""
        ...

    def capacity(self) -> int | None:
        """For how many workers there is room at present; None: for as many as are wanted."""
        ...

    def want(self, workers: int) -> None:
        """So many are wished for from now on, be there room for them yet or not."""
        ...

    def load(self, end: int, run: Path, lease_s: float) -> None:
        """A run begins: so many bytes of the task memory are its task. A host whose hands do not
        hear of us for `lease_s` stops them."""
        ...

    def berth(self, worker: int) -> WorkerPlace:
        """Choose where a worker is going to be started."""
        ...

    def start(self, worker: int, orders: bytes, log: Path) -> None:
        """At its berth."""
        ...

    def poll(self) -> list[LauncherEvent]:
        """What happened since the last call; never blocks. `fileno()` becomes readable before."""
        ...

    def fileno(self) -> int: ...

    def kill(self, worker: int) -> None:
        """End one worker, however stuck it is; `poll` tells when it has been seen dead."""
        ...

    def drop(self, at: str, because: str) -> None:
        """Give up a host and all workers on it; `poll` tells of their end."""
        ...

    def silence(self, at: str) -> float:
        """For how many seconds a host has not answered."""
        ...

    def stop(self) -> None:
        """End every worker and see it gone; the memory is blank again. May be called twice."""
        ...

    def close(self) -> None:
        """Stop, and give everything back. The launcher cannot be used any more."""
        ...


class Local:
    """Processes of this host, forked by an agent that is this process's child.

    Constructing it only starts the agent, which then imports torch while the caller does other
    things; so construct it early.
    """

    most_workers: int | None = None
    listens = "127.0.0.1"
    many, grows, replaceable = False, False, True

    def __init__(self, entry: str, fds: tuple[int, int]) -> None:
        self.entry, self.fds = entry, fds
        self.folder = ""
        """The current directory of workers; "": this process's."""
        self.channel, self.agent = self._start_agent()
        self.alive: dict[int, int] = {}
        self.used = False
        self.born = time.time()

    def _start_agent(self) -> tuple[socket.socket, "subprocess.Popen[bytes]"]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            agent = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    AGENT,
                    str(theirs.fileno()),
                    self.entry,
                ],
                pass_fds=(theirs.fileno(), *self.fds),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the driver, which then asks workers to stop
                env=agent_environment(),
            )
        return ours, agent

    def inventory(self) -> Machine:
        return machine()

    def reserve(self, least: int, most: int, threads: int) -> None:
        """A host takes as many as are started."""

    def capacity(self) -> int | None:
        return None

    def want(self, workers: int) -> None:
        """Nobody brings another host."""

    def load(self, end: int, run: Path, lease_s: float) -> None:
        """Workers inherit what they need, and die with their agent."""

    def berth(self, worker: int) -> WorkerPlace:
        return WorkerPlace(at="", fds=self.fds)

    def start(self, worker: int, orders: bytes, log: Path) -> None:
        self.alive[worker], self.used = 0, True
        with suppress(BrokenPipeError, ConnectionResetError):  # poll will tell
            self.channel.send(encode(StartWorker(worker, orders, str(log.absolute()), self.folder)))

    def poll(self) -> list[LauncherEvent]:
        signs: list[LauncherEvent] = []
        with suppress(BlockingIOError):
            while True:
                try:
                    data = self.channel.recv(MAX_MESSAGE, socket.MSG_DONTWAIT)
                except ConnectionResetError:  # it was killed before it had read everything
                    data = b""
                if not data:
                    return signs + self._agent_gone()
                sign = decode_from_agent(data)
                if isinstance(sign, AgentUnable):
                    raise RequestError(f"workers cannot be started: {sign.text}")
                if isinstance(sign, WorkerStarted):
                    self.alive[sign.worker] = sign.pid
                else:
                    self.alive.pop(sign.worker, None)
                signs.append(sign)
        return signs

    def _agent_gone(self) -> list[LauncherEvent]:
        """Its workers have died with it; the memory has not. Another agent takes its place."""
        self.agent.wait()
        gone: list[LauncherEvent] = [
            WorkerExit(worker, pid, -9) for worker, pid in self.alive.items()
        ]
        for pid in self.alive.values():
            _see_dead(pid)
        self.alive.clear()
        if self.used:
            channel, self.agent = self._start_agent()
            os.dup2(channel.fileno(), self.channel.fileno())  # whoever polls it knows the number
            channel.close()
        return gone

    def fileno(self) -> int:
        return self.channel.fileno()

    def kill(self, worker: int) -> None:
        with suppress(OSError):
            self.channel.send(encode(KillWorker(worker)))

    def drop(self, at: str, because: str) -> None:
        """There is no other host to be cut off from."""

    def silence(self, at: str) -> float:
        return 0.0

    def stop(self) -> None:
        for worker in list(self.alive):
            self.kill(worker)
        deadline = time.monotonic() + 5
        while self.alive and time.monotonic() < deadline and self.agent.poll() is None:
            self.poll()
            time.sleep(0.002)
        blank(self.fds)

    def close(self) -> None:
        if self.channel.fileno() < 0:
            return
        self.stop()
        self.channel.close()  # the agent goes when we hang up
        if not self.used:  # it may still be busy importing torch
            self.agent.kill()
        try:
            self.agent.wait(5)
        except subprocess.TimeoutExpired:
            self.agent.kill()
            self.agent.wait()
        for fd in self.fds:
            os.close(fd)


class Inline:
    """One worker, in a thread of this process: for debuggers and for places without fork."""

    most_workers: int | None = 1
    listens = "127.0.0.1"
    many = grows = replaceable = False

    def __init__(self, entry: str, fds: tuple[int, int]) -> None:
        module, _, function = entry.partition(":")
        self.entry: Callable[[bytes], int] = getattr(importlib.import_module(module), function)
        self.fds = fds
        self.signs: queue.SimpleQueue[LauncherEvent] = queue.SimpleQueue()
        self._event = os.eventfd(0, os.EFD_NONBLOCK)
        self._thread: threading.Thread | None = None
        self.born, self.used = time.time(), False

    def inventory(self) -> Machine:
        return machine()

    def reserve(self, least: int, most: int, threads: int) -> None:
        """A host takes as many as are started."""

    def capacity(self) -> int | None:
        return None

    def want(self, workers: int) -> None:
        """Nobody brings another host."""

    def load(self, end: int, run: Path, lease_s: float) -> None:
        """It is this process's own memory."""

    def berth(self, worker: int) -> WorkerPlace:
        return WorkerPlace(at="", fds=self.fds)

    def start(self, worker: int, orders: bytes, log: Path) -> None:
        assert self._thread is None, "the plan knows most_workers"
        self.used = True
        self._tell(WorkerStarted(worker, os.getpid()))
        self._thread = threading.Thread(
            target=self._work, args=(worker, orders), name="worker", daemon=True
        )
        self._thread.start()

    def _work(self, worker: int, orders: bytes) -> None:
        code = 1
        try:
            code = self.entry(orders)
        finally:
            self._tell(WorkerExit(worker, os.getpid(), code))

    def _tell(self, sign: LauncherEvent) -> None:
        self.signs.put(sign)
        os.eventfd_write(self._event, 1)

    def poll(self) -> list[LauncherEvent]:
        with suppress(BlockingIOError):
            os.eventfd_read(self._event)
        signs: list[LauncherEvent] = []
        with suppress(queue.Empty):
            while True:
                signs.append(self.signs.get_nowait())
        return signs

    def fileno(self) -> int:
        return self._event

    def kill(self, worker: int) -> None:
        """A thread cannot be killed; nobody asks, because it is not replaceable."""

    def drop(self, at: str, because: str) -> None:
        """There is no other host to be cut off from."""

    def silence(self, at: str) -> float:
        return 0.0

    def stop(self) -> None:
        if self._thread is not None:
            self._thread.join(5)
            if self._thread.is_alive():  # it cannot be killed; its memory stays its own
                return
            self._thread = None
        blank(self.fds)

    def close(self) -> None:
        if self._event < 0:
            return
        self.stop()
        if self._thread is None:
            for fd in (self._event, *self.fds):
                os.close(fd)
        self._event = -1


def _see_dead(pid: int) -> None:
    """Wait until a process that was killed runs no more (it need not have been reaped)."""
    deadline = time.monotonic() + 5
    while pid and time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return
        if state in "ZX":
            return
        time.sleep(0.002)


def blank(fds: tuple[int, int]) -> None:
    """Forget the contents; pages go back to the system."""
    for fd in fds:
        os.ftruncate(fd, 0)
        os.ftruncate(fd, RESERVED_BYTES)
