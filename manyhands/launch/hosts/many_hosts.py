# SPDX-License-Identifier: Apache-2.0
"""Workers on several hosts: this one, if it has hands to give, and all that join.

A host that is given up counts as dead with all its workers, whatever it does: nothing it says is
heard any more, and other hosts' memory it could never write to. When it comes back it is new.
"""

import os
import platform
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import zmq

from manyhands.launch.engines.agent import KillWorker, StartWorker, WorkerExit, WorkerStarted
from manyhands.launch.engines.launcher import (
    HostNews,
    LauncherEvent,
    LauncherWarning,
    Local,
    WorkerPlace,
    blank,
)
from manyhands.launch.hosts.join_protocol import Blank, Load, Logged, ProbeAnswer
from manyhands.launch.hosts.join_server import (
    HostCame,
    HostGone,
    HostReady,
    HostSaid,
    JoinedHost,
    JoinServer,
)
from manyhands.launch.shipping.ship_files import pack_files
from manyhands.values.credentials import write_token
from manyhands.values.errors import RequestError
from manyhands.values.version import VERSION
from manyhands.values.world import Machine, machine, torch_version

REST_S, MOST_REST_S = 10.0, 300.0
"""How long a host that others could not reach stays away, the first time and at the most."""


class HostStarter(Protocol):
    """Something that was started to bring a host here, and is seen to end with the cluster."""

    def close(self) -> None: ...


class HostProvider(Protocol):
    """Brings hosts as they are needed, and in place of those that are lost."""

    def room(self) -> int:
        """Cores that it could bring beyond those that are here."""
        ...

    def reserve(self, least: int, most: int, threads: int) -> None:
        """Bring room for the least, or raise. Then look for the most; what is beyond that and has
        been idle for a while is given back."""
        ...

    def news(self) -> list[HostNews]: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class _Host:
    guest: JoinedHost
    workers: dict[int, int] = field(default_factory=dict[int, int])
    """worker → pid; 0 until it has started."""


@dataclass(frozen=True, slots=True)
class Listening:
    """Where hosts can join."""

    addresses: list[str]
    port: int = 0
    secret: bytes = b""
    here: int | None = None
    """Workers that this host takes; None: as many as it has cores, 0: none."""

    @property
    def shown(self) -> str:
        """How this host is reached by others."""
        first = self.addresses[0]
        return own_address() if first in ("0.0.0.0", "::", "*") else first


class ManyHosts:
    """A Launcher of workers on all hosts that are here."""

    most_workers: int | None = None
    many = replaceable = True

    def __init__(self, entry: str, fds: tuple[int, int], listening: Listening) -> None:
        self.listening, self.fds = listening, fds
        self.starters: list[HostStarter] = []
        self.provider: HostProvider | None = None
        self.ship: tuple[Path, ...] = ()
        """What workers on other hosts find in their current directory."""
        self.marker: Path | None = None
        self.listens = listening.addresses[0]
        self.born, self.used = time.time(), False
        self.here_slots = machine().cores if listening.here is None else listening.here
        self.here = Local(entry, fds) if self.here_slots else None
        try:
            self.gate = JoinServer(listening.secret, listening.addresses, listening.port)
        except zmq.ZMQError as error:
            if self.here is not None:
                self.here.close()
            where = ", ".join(listening.addresses)
            raise RequestError(f"cannot listen at {where}:{listening.port}: {error}") from error
        self.hosts: dict[str, _Host] = {}
        self.at: dict[int, str] = {}
        """worker → host; "" is this one."""
        self.doomed: set[int] = set()
        """Killed, and not seen dead yet: their slots can be given away."""
        self.log_of: dict[int, Path] = {}
        self.drops = Counter[str]()
        self.unborn: list[WorkerExit] = []
        """Workers that could not even be started."""
        self.closed = False
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.gate.event, selectors.EVENT_READ)
        if self.here is not None:
            self.selector.register(self.here.fileno(), selectors.EVENT_READ)

    # ---- what there is

    @property
    def grows(self) -> bool:
        return self.provider is None  # who brings hosts is told how many are wanted

    def inventory(self) -> Machine:
        mine = machine()
        guests = [host.guest.here for host in self.hosts.values()]
        cores = self.here_slots + sum(g.slots for g in guests)
        cores += 0 if self.provider is None else self.provider.room()
        memory = mine.memory_bytes + sum(g.memory_bytes for g in guests)
        return Machine(mine.host, max(1, cores), memory)

    def reserve(self, least: int, most: int, threads: int) -> None:
        if self.provider is not None:
            self.provider.reserve(least, most, threads)

    def capacity(self) -> int:
        ready = [h.guest.here.slots for h in self.hosts.values() if h.guest.settled is not None]
        return self.here_slots + sum(ready)

    def want(self, workers: int) -> None:
        """Hosts come when somebody starts them, or are brought."""
        if self.provider is not None:
            self.provider.reserve(0, workers, 1)

    def wait_for(self, count: int, patience_s: float, alive: Callable[[], None]) -> None:
        """Until so many hosts have joined. `alive` raises when one of them never will."""
        deadline = time.monotonic() + patience_s
        while len(self.hosts) < count:
            self.poll()
            alive()
            if time.monotonic() > deadline:
                names = ", ".join(h.guest.here.name for h in self.hosts.values()) or "none"
                raise RequestError(
                    f"{len(self.hosts)} of {count} hosts have joined within {patience_s:.0f} s "
                    f"({names}). Look at the others: can they reach this host at "
                    f"{self.listening.shown}:{self.gate.port}?"
                )
            self.selector.select(0.1)

    # ---- a run

    def load(self, end: int, run: Path, lease_s: float) -> None:
        task, end = end, pack_files(self.ship, self.fds[0], end)
        marker = run / f".here-{os.getpid()}-{time.time_ns():x}"
        marker.touch()
        self.marker = marker
        write_token(run / "join.token", self.listening.secret)
        files = task if end > task else 0
        self.gate.load(Load(str(run.absolute()), end, marker.name, lease_s, files), self.fds[0])

    def berth(self, worker: int) -> WorkerPlace:
        """The host with the largest part of its slots free; this one among equals."""
        slots = {key: h.guest.here.slots for key, h in self.hosts.items() if h.guest.settled}
        if self.here_slots or not slots:
            slots = {"": self.here_slots, **slots}
        taken = Counter(at for w, at in self.at.items() if w not in self.doomed)
        # One that is leaving may still have its slot: then some host has one too many for a while.
        return self._berth(worker, max(slots, key=lambda key: 1 - taken[key] / max(1, slots[key])))

    def _berth(self, worker: int, key: str) -> WorkerPlace:
        self.at[worker] = key
        if key == "":
            shown = self.listening.shown
            return WorkerPlace(at="", fds=self.fds, address=shown, driver=shown)
        guest = self.hosts[key].guest
        assert guest.settled is not None
        return WorkerPlace(
            at=key,
            fds=guest.settled.fds,
            address=guest.here.address,
            driver=self.listening.shown,
            run=guest.settled.run,
            shares=guest.settled.shares,
            name=guest.here.name,
        )

    def start(self, worker: int, orders: bytes, log: Path) -> None:
        self.used = True
        key = self.at[worker]
        if key == "" and self.here is not None:
            self.here.start(worker, orders, log)
        elif key not in self.hosts:
            self.unborn.append(WorkerExit(worker, 0, -9, lost="no host had room for it"))
        else:
            self.hosts[key].workers[worker] = 0
            self.log_of[worker] = log.absolute()
            self.gate.send(key, StartWorker(worker, orders, str(log.absolute())))

    def poll(self) -> list[LauncherEvent]:
        signs: list[LauncherEvent] = [] if self.here is None else self.here.poll()
        signs, self.unborn = [*signs, *self.unborn], []
        signs += [] if self.provider is None else self.provider.news()
        if (text := self.gate.strangers.words()) is not None:
            signs.append(LauncherWarning(text))
        for happening in self.gate.happened():
            match happening:
                case HostCame(guest=guest):
                    signs += self._came(guest)
                case HostReady():
                    pass
                case HostGone(key=key, because=because):
                    signs += self._gone(key, because)
                case HostSaid(key=key, message=message):
                    signs += self._said(key, message)
        for sign in signs:
            if isinstance(sign, WorkerExit):
                self.at.pop(sign.worker, None)
                self.doomed.discard(sign.worker)
        return signs

    def _came(self, guest: JoinedHost) -> list[LauncherEvent]:
        here = guest.here
        if (problem := differs(here.version, here.torch, here.python)) is not None:
            self.gate.drop(guest.key, problem)
            return [HostNews(here.name, f"was turned away: {problem}")]
        self.hosts[guest.key] = _Host(guest)
        room = f"{here.slots} worker{'s' * (here.slots != 1)}"
        return [HostNews(here.name, f"has joined, with room for {room}")]

    def _gone(self, key: str, because: str) -> list[LauncherEvent]:
        host = self.hosts.pop(key, None)
        if host is None:
            return []
        name = host.guest.here.name
        news: list[LauncherEvent] = [HostNews(name, f"is gone: {because}")]
        return news + [
            WorkerExit(w, pid, -9, host=name, lost=because) for w, pid in host.workers.items()
        ]

    def _said(
        self, key: str, message: WorkerStarted | WorkerExit | Logged | ProbeAnswer
    ) -> list[LauncherEvent]:
        host = self.hosts.get(key)
        if host is None or isinstance(message, ProbeAnswer) or message.worker not in host.workers:
            return []
        match message:
            case Logged(worker=worker, data=data):
                with self.log_of[worker].open("ab") as file:
                    file.write(data)
                return []
            case WorkerStarted(worker=worker, pid=pid):
                host.workers[worker] = pid
            case WorkerExit(worker=worker):
                del host.workers[worker]
        return [message]

    def fileno(self) -> int:
        return self.selector.fileno()  # type: ignore[attr-defined]  # epoll's

    def kill(self, worker: int) -> None:
        key = self.at.get(worker)
        self.doomed.add(worker)
        if key == "" and self.here is not None:
            self.here.kill(worker)
        elif key:
            self.gate.send(key, KillWorker(worker))

    def drop(self, at: str, because: str) -> None:
        """Until it comes back as somebody new, each time later: it may be no better then."""
        if at in self.hosts:
            guest = self.hosts[at].guest
            name, guest.settled = guest.here.name, None  # nobody is started there any more
            self.drops[name] += 1
            wait_s = min(MOST_REST_S, REST_S * 2 ** (self.drops[name] - 1))
            self.gate.drop(at, because, wait_s)

    def silence(self, at: str) -> float:
        host = self.hosts.get(at)
        return 0.0 if host is None else max(0.0, time.monotonic() - host.guest.heard)

    def stop(self) -> None:
        self.gate.unload()
        self.reserve(0, 0, 1)
        for key in self.hosts:
            self.gate.send(key, Blank())
        if self.here is not None:
            self.here.stop()
        else:
            blank(self.fds)
        for host in self.hosts.values():
            host.workers.clear()
        self.at.clear()
        self.doomed.clear()
        if self.marker is not None:
            self.marker.unlink(missing_ok=True)
            self.marker.with_name("join.token").unlink(missing_ok=True)
            self.marker = None

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self.stop()
        self.gate.close("the run is over")
        for starter in self.starters:
            starter.close()
        if self.provider is not None:
            self.provider.close()
        if self.here is not None:
            self.here.close()
        else:
            for fd in self.fds:
                os.close(fd)
        self.selector.close()


def differs(version: str, torch: str, python: str) -> str | None:
    """Why a host cannot take part: other versions may compute other bits, or not know the code."""
    if version != VERSION:
        return f"it has manyhands {version}, this host has {VERSION}"
    if torch.partition("+")[0] != torch_version().partition("+")[0]:
        return f"it has torch {torch}, this host has {torch_version()}"
    mine = platform.python_version()
    if python.split(".")[:2] != mine.split(".")[:2]:
        return f"it has Python {python}, this host has {mine}"
    return None


def own_address() -> str:
    """An address of this host by which others are likely to reach it."""
    for there in ("192.0.2.1", "2001:db8::1"):  # nothing is sent
        family = socket.AF_INET6 if ":" in there else socket.AF_INET
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((there, 9))
                return probe.getsockname()[0]
        except OSError:
            continue
    return "127.0.0.1"
