# SPDX-License-Identifier: Apache-2.0
"""The hosts of a run: this one, if it takes workers, and all that have joined.

A host that is given up counts as dead with all its workers, whatever it does: nothing it says is
heard any more, and other hosts' memory it could never write to. When it comes back it is new.
"""

import os
import platform
import socket
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import zmq

from manyhands.launch.engines.launcher import HostNews, HostsNow, WorkerPlace, drivers_own
from manyhands.launch.hosts.join_protocol import Load
from manyhands.launch.hosts.join_server import JoinedHost, JoinServer
from manyhands.launch.hosts.message_digest import message_digest
from manyhands.launch.hosts.withdrawn_hosts import WithdrawnHosts
from manyhands.launch.shipping.ship_files import pack_files
from manyhands.values.errors import RequestError
from manyhands.values.join_token import DriverKey, write_token
from manyhands.values.machine import Machine, machine, torch_version
from manyhands.values.run_folder import RunDir
from manyhands.values.version import VERSION
from manyhands.values.worker_status import HostStatus

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


@dataclass(frozen=True, slots=True)
class Listening:
    """Where hosts can join."""

    addresses: list[str]
    port: int = 0
    key: DriverKey = field(default_factory=DriverKey)
    here: int | None = None
    """Workers that this host takes; None: as many as it has cores, 0: none."""

    @property
    def shown(self) -> str:
        """How this host is reached by others."""
        first = self.addresses[0]
        return own_address() if first in ("0.0.0.0", "::", "*") else first


@dataclass(slots=True)
class OtherHost:
    """A host that has joined, and its workers."""

    guest: JoinedHost
    workers: dict[int, int] = field(default_factory=dict[int, int])
    """worker → pid; 0 until it has started."""


class JoinedHosts:
    """The `Hosts` of a launcher on several hosts. Whoever has a part in bringing hosts here (over
    ssh, or by Ray) is closed with it."""

    def __init__(self, listening: Listening, task_fd: int) -> None:
        self.listening, self.task_fd = listening, task_fd
        self.here_slots = machine().cores if listening.here is None else listening.here
        try:
            self.server = JoinServer(listening.key, listening.addresses, listening.port)
        except zmq.ZMQError as error:
            where = ", ".join(listening.addresses)
            raise RequestError(f"cannot listen at {where}:{listening.port}: {error}") from error
        self.others: dict[str, OtherHost] = {}
        self.starters: list[HostStarter] = []
        self.provider: HostProvider | None = None
        self.ship: tuple[Path, ...] = ()
        """What workers on other hosts find in their current directory."""
        self.drops = Counter[str]()
        self.refused: dict[str, str] = {}
        """Hosts that came with other versions, and what was said about it."""
        self._marker: Path | None = None

    # ---- the contract

    @property
    def grows(self) -> bool:
        return self.provider is None  # who brings hosts is told how many are wanted

    def inventory(self) -> Machine:
        mine = machine()
        guests = [host.guest.here for host in self.others.values()]
        cores = self.here_slots + sum(g.slots for g in guests)
        cores += 0 if self.provider is None else self.provider.room()
        memory = mine.memory_bytes + sum(g.memory_bytes for g in guests)
        return Machine(mine.host, max(1, cores), memory)

    def reserve(self, least: int, most: int, threads: int = 1) -> None:
        """Hosts come when somebody starts them, or are brought."""
        if self.provider is not None:
            self.provider.reserve(least, most, threads)

    def load(self, task_bytes: int, run: Path, lease_s: float) -> None:
        end = pack_files(self.ship, self.task_fd, task_bytes)
        marker = run / f".here-{os.getpid()}-{time.time_ns():x}"
        marker.touch()
        self._marker = marker
        write_token(run / "join.token", self.listening.key.token())
        self.server.holders.withdrawn = WithdrawnHosts(RunDir(run))
        for host in self.others.values():  # of a run that has gone on without them since
            if problem := self.server.holders.objection(host.guest.here.name, host.guest.token):
                host.guest.settled = None
                self.server.turn_away(host.guest.key, problem)
        files = task_bytes if end > task_bytes else 0
        load = Load(str(run.absolute()), end, marker.name, lease_s, files)
        self.server.load(load, self.task_fd)

    def look(self) -> HostsNow:
        now = time.monotonic()
        ready = [h.guest.here.slots for h in self.others.values() if h.guest.settled is not None]
        silent = {key: max(0.0, now - host.guest.heard) for key, host in self.others.items()}
        count = len(ready) + (self.here_slots > 0)
        return HostsNow(self.here_slots + sum(ready), count, silent)

    def drop(self, at: str, because: str) -> None:
        """Until it comes back as somebody new, each time later: it may be no better then."""
        if at in self.others:
            guest = self.others[at].guest
            name, guest.settled = guest.here.name, None  # nobody is started there any more
            self.drops[name] += 1
            wait_s = min(MOST_REST_S, REST_S * 2 ** (self.drops[name] - 1))
            self.server.drop(at, because, wait_s)

    def roster(self) -> dict[str, HostStatus]:
        own = drivers_own(self.listening.shown, self.here_slots)
        return {"": own} | {at: self._status(host.guest) for at, host in self.others.items()}

    def _status(self, guest: JoinedHost) -> HostStatus:
        here = guest.here
        state = "ready" if guest.settled is not None else "getting ready"
        token = "its own" if self._own_token(guest) else "shared"
        return HostStatus(here.name, here.address, here.slots, guest.since, state, token)

    def _own_token(self, guest: JoinedHost) -> bool:
        return bool(self.listening.key.holder(guest.token))

    def withdraw(self, name: str) -> str:
        if self.provider is not None:
            raise RequestError(
                "Ray brings the hosts of this run, and would bring another in its place."
            )
        found = [at for at, host in self.others.items() if host.guest.here.name == name]
        if not found:
            names = ", ".join(sorted({h.guest.here.name for h in self.others.values()})) or "none"
            raise RequestError(f"no host {name} has joined this run; those that have: {names}.")
        own = all(self._own_token(self.others[at].guest) for at in found)
        for at in found:
            self._dismiss(self.others[at].guest)
        if own:
            return f"host {name} was dropped, and its token is withdrawn"
        return (
            f"host {name} was dropped, and cannot come back under this name. It has the token that "
            "all have: to be sure of it, give hosts tokens of their own (manyhands token --for)"
        )

    def _dismiss(self, guest: JoinedHost) -> None:
        guest.settled = None  # nobody is started there any more
        name = guest.here.name
        self.server.holders.withdrawn.add(name, guest.token if self._own_token(guest) else None)
        self.server.turn_away(guest.key, f"host {name} was dropped from this run by hand")

    # ---- who comes and goes

    def came(self, guest: JoinedHost) -> HostNews | None:
        """None: it is known that it cannot take part, and was told before."""
        here = guest.here
        problem = differs(here.version, here.torch, here.python, here.messages)
        if problem is not None:
            self.server.turn_away(guest.key, f"host {here.name} was turned away: {problem}")
            if self.refused.get(here.name) == problem:
                return None
            self.refused[here.name] = problem
            return HostNews(here.name, f"was turned away: {problem}")
        self.refused.pop(here.name, None)
        self.others[guest.key] = OtherHost(guest)
        room = f"{here.slots} worker{'s' * (here.slots != 1)}"
        return HostNews(here.name, f"has joined, with room for {room}")

    def refusals(self) -> str:
        """Who was turned away and why, in sentences."""
        told = [f"Host {name} was turned away: {why}" for name, why in self.refused.items()]
        return " ".join(told)

    def place(self, taken: Counter[str], fds: tuple[int, int]) -> WorkerPlace:
        """On the host with the largest part of its slots free; this one among equals. `taken` are
        the workers of each host, `fds` the memory of this one."""
        # Once for each: the server's thread takes it back when a host is told to go.
        settled = {key: host.guest.settled for key, host in self.others.items()}
        slots = {key: self.others[key].guest.here.slots for key, there in settled.items() if there}
        if self.here_slots or not slots:
            slots = {"": self.here_slots, **slots}
        # One that is leaving may still have its slot: then some host has one too many for a while.
        key = max(slots, key=lambda key: 1 - taken[key] / max(1, slots[key]))
        shown = self.listening.shown
        if key == "":
            return WorkerPlace(at="", fds=fds, address=shown, driver=shown)
        guest, there = self.others[key].guest, settled[key]
        assert there is not None
        return WorkerPlace(
            at=key,
            fds=there.fds,
            address=guest.here.address,
            driver=shown,
            run=there.run,
            shares=there.shares,
            name=guest.here.name,
        )

    # ---- how it ends

    def unload(self) -> None:
        """The run is over; its memory on other hosts is blanked."""
        self.server.unload()
        self.server.holders.withdrawn = WithdrawnHosts()
        self.reserve(0, 0)
        for host in self.others.values():
            host.workers.clear()
        if self._marker is not None:
            self._marker.unlink(missing_ok=True)
            self._marker.with_name("join.token").unlink(missing_ok=True)
            self._marker = None

    def close(self) -> None:
        self.server.close("the run is over")
        for starter in self.starters:
            starter.close()
        if self.provider is not None:
            self.provider.close()


def differs(version: str, torch: str, python: str, messages: str | None = None) -> str | None:
    """Why a host cannot take part, and what to do: other versions may compute other bits, or not
    know the code. `messages`: the digest of those that it knows."""
    there = "the driver's host has"
    if version != VERSION:
        what = f"it has manyhands {version}, {there} {VERSION}"
        return f"{what}. Install the same on both (pip install manyhands=={VERSION})."
    if torch.partition("+")[0] != torch_version().partition("+")[0]:
        mine = torch_version()
        what = f"it has torch {torch}, {there} {mine}"
        return f"{what}. Install the same on both (pip install torch=={mine.partition('+')[0]})."
    mine = platform.python_version()
    if python.split(".")[:2] != mine.split(".")[:2]:
        what = f"it has Python {python}, {there} {mine}"
        return f"{what}. Install manyhands there for Python {mine.rpartition('.')[0]}."
    if messages is not None and messages != message_digest():
        what = f"it has manyhands {version} with other messages (digest {messages or 'unknown'})"
        mine = f"than {VERSION} on the driver's host ({message_digest()})"
        return f"{what} {mine}. Install the same checkout on both."
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
