# SPDX-License-Identifier: Apache-2.0
"""Where hosts join a run, and how it is known that they are still there.

One thread owns the socket: it pings every host, judges by the echoes who is gone, and hands out the
task's bytes. That must not wait for the driver's other work, or a slow disk of the driver's would
look like a cut link to everybody. What matters to the supervisor is put in a queue for it.
"""

import os
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec
import zmq

from manyhands.launch.engines.fork_agent import WorkerExit, WorkerStarted
from manyhands.launch.hosts.join_protocol import (
    IDLE_S,
    PIECE_BYTES,
    PING_S,
    Blank,
    Blanked,
    Bye,
    Echo,
    FilePiece,
    Going,
    Here,
    HostDropped,
    Load,
    Logged,
    LogTaken,
    Ping,
    ProbeAnswer,
    Settled,
    ToHost,
    TurnedAway,
    Want,
    decode_from_host,
    encode,
)
from manyhands.launch.hosts.withdrawn_hosts import WithdrawnHosts
from manyhands.values.bounded_types import NotUnderstood
from manyhands.values.guarded_router import GuardedRouter
from manyhands.values.join_token import DriverKey
from manyhands.values.printable_text import printable
from manyhands.values.version import VERSION

MOST_BYTES = 256 << 10
"""Hosts say nothing longer."""
ODD_REST_S = 60.0
"""How long a host stays away that said what no host says."""
BLANK_S = 6.0
"""How long hosts may take to end the workers of a run that is over."""
MOST_UNSENT = 256
"""Messages that are kept for a host that does not read them."""


@dataclass(slots=True)
class JoinedHost:
    """A host that has joined."""

    key: str
    here: Here
    settled: Settled | None = None
    heard: float = 0.0
    """When it last said anything."""
    token: bytes = b""
    """The public key of the token by which it came."""
    since: float = field(default_factory=time.time)


@dataclass(frozen=True, slots=True)
class HostCame:
    guest: JoinedHost


@dataclass(frozen=True, slots=True)
class HostReady:
    guest: JoinedHost


@dataclass(frozen=True, slots=True)
class HostGone:
    key: str
    because: str


@dataclass(frozen=True, slots=True)
class HostSaid:
    key: str
    message: WorkerStarted | WorkerExit | Logged | ProbeAnswer


Happening = HostCame | HostReady | HostGone | HostSaid


class TokenHolders:
    """The authenticator's question: has this client a token of ours, and one that still holds?"""

    def __init__(self, key: DriverKey) -> None:
        self.key = key
        self.withdrawn = WithdrawnHosts()
        """Of the run that goes on."""

    def callback(self, domain: str, key: bytes) -> bool:
        return self.key.holder(key) is not None and not self.withdrawn.has_token(key)

    def objection(self, name: str, token: bytes) -> str | None:
        """Why a host of that name cannot come by this token, if so."""
        made_for = self.key.holder(token)
        if made_for and made_for != name:
            return f"this token was made for host {made_for}, not for {name}."
        if self.withdrawn.has_token(token) or self.withdrawn.has_name(name):
            return f"host {name} was dropped from this run, and cannot come back to it."
        return None


class JoinServer:
    """The driver's end. Only its thread touches the socket."""

    def __init__(self, key: DriverKey, addresses: list[str], port: int = 0) -> None:
        self.holders = TokenHolders(key)
        self.router = GuardedRouter(*key.pair, self.holders, most_bytes=MOST_BYTES)
        self.socket, self.refusals = self.router.socket, self.router.refusals
        self.socket.sndhwm = MOST_UNSENT
        try:
            self.port = self.router.bind(addresses, port)
        except zmq.ZMQError:
            self.router.close()
            raise
        self.socket.linger = 1000
        self.happenings: queue.SimpleQueue[Happening] = queue.SimpleQueue()
        self.event = os.eventfd(0, os.EFD_NONBLOCK)
        """Readable when something has happened."""
        self.guests: dict[str, JoinedHost] = {}
        self._load: Load | None = None
        self._task_fd = -1
        self._errands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._number = 0
        self._working: set[str] = set()
        """Hosts that may still have workers of a run that is over ..."""
        self._blank = threading.Event()
        """... until this is set."""
        self._thread = threading.Thread(target=self._run, name="join server", daemon=True)
        self._thread.start()

    # ---- for the launcher; from any thread

    def load(self, load: Load, task_fd: int) -> None:
        """There is a run now. All who are here, and all who come, are told."""

        def tell() -> None:
            self._load, self._task_fd = load, task_fd
            for guest in self.guests.values():
                guest.heard = time.monotonic()  # it may have had a longer lease until now
                self._welcome(guest)

        self._do(tell)

    def unload(self) -> None:
        """The run is over: all forget it, and their workers are dead on return. A host that does
        not answer kills them itself, when it has not heard of us for a lease."""
        blank = threading.Event()

        def forget() -> None:
            self._blank = blank
            self._working = set(self.guests if self._load is not None else ())
            self._load = None
            for guest in self.guests.values():
                guest.settled = None
                guest.heard = time.monotonic()  # it has its hands full now
                self._send(guest.key, Blank())
            self._rests("")

        self._do(forget)
        blank.wait(BLANK_S)

    def _rests(self, key: str) -> None:
        """No worker of the run that is over is there any more."""
        self._working.discard(key)
        if not self._working:
            self._blank.set()

    def send(self, key: str, message: ToHost) -> None:
        self._do(lambda: self._send(key, message))

    def drop(self, key: str, because: str, wait_s: float = 0.0) -> None:
        """Give a host up. If it can still hear, it may come back as somebody new, after a while."""
        self._do(lambda: self._give_up(key, because, HostDropped(because, wait_s)))

    def turn_away(self, key: str, because: str) -> None:
        """Give a host up for good."""
        self._do(lambda: self._give_up(key, because, TurnedAway(because)))

    def happened(self) -> list[Happening]:
        with suppress(BlockingIOError):
            os.eventfd_read(self.event)
        found: list[Happening] = []
        with suppress(queue.Empty):
            while True:
                found.append(self.happenings.get_nowait())
        return found

    def close(self, because: str) -> None:
        """Tell everybody that it is over."""

        def tell() -> None:
            for key in list(self.guests):
                self._send(key, Bye(because))

        self._do(tell)
        self._errands.put(None)
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        self.router.close()
        os.close(self.event)
        os.close(self._wake)

    def _do(self, errand: Callable[[], None]) -> None:
        self._errands.put(errand)
        os.eventfd_write(self._wake, 1)

    # ---- the thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self.socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        due = last = time.monotonic()
        while True:
            poller.poll(max(0, int((due - time.monotonic()) * 1000) + 1))
            now = time.monotonic()
            if now - last > 2 * PING_S:  # it was we who did not listen: nobody else's fault
                for guest in self.guests.values():
                    guest.heard += now - last
            last = now
            with suppress(BlockingIOError):
                os.eventfd_read(self._wake)
            if not self._run_errands():
                return
            self._receive()
            if now >= due:
                due = now + PING_S
                self._ping(now)

    def _run_errands(self) -> bool:
        with suppress(queue.Empty):
            while True:
                errand = self._errands.get_nowait()
                if errand is None:
                    return False
                errand()
        return True

    def _receive(self) -> None:
        while (received := self.router.receive()) is not None:
            identity, data = received
            try:
                message = decode_from_host(data)
            except NotUnderstood as error:
                self._blame(identity.hex(), printable(str(error), 200))
                continue
            self._hear(identity.hex(), message, self.router.key)

    def _hear(self, key: str, message: msgspec.Struct, token: bytes) -> None:
        guest = self.guests.get(key)
        if guest is None:
            if isinstance(message, Here):
                self._meet(key, message, token)
            elif not isinstance(message, Bye):
                self._send(key, HostDropped("this run does not know you"))
            return
        guest.heard = time.monotonic()
        match message:
            case Echo():
                pass
            case Want() | Settled() if self._load is None or key in self._working:
                pass  # of the run that is over: it was said before the host heard so
            case Want(offset=offset):
                assert self._load is not None
                size = min(PIECE_BYTES, max(0, self._load.end - offset))
                self._send(key, FilePiece(offset, os.pread(self._task_fd, size, offset)))
            case Settled():
                guest.settled = message
                self._tell(HostReady(guest))
            case Logged():
                self._send(key, LogTaken())
                self._tell(HostSaid(key, message))
            case WorkerStarted() | WorkerExit() | ProbeAnswer():
                self._tell(HostSaid(key, message))
            case Blanked():
                self._rests(key)
            case Going():
                guest.settled = None
            case Bye(because=because):
                del self.guests[key]
                self._rests(key)
                self._tell(HostGone(key, because))
            case _:
                self._blame(key, f"{type(message).__name__}, now")

    def _blame(self, key: str, why: str) -> None:
        """What one host says that no host says costs it its place, and nobody else anything."""
        self.router.refuse()
        if (guest := self.guests.get(key)) is None:
            # It has a token, and may be of a version that says it otherwise: it need not guess.
            self._send(
                key,
                TurnedAway(
                    f"what it says cannot be read by manyhands {VERSION}, which"
                    " this run has. Install the same on both hosts."
                ),
            )
        else:
            why = f"host {guest.here.name} said what no host says: {why}"
            self._give_up(key, why, HostDropped(why, ODD_REST_S))

    def _meet(self, key: str, here: Here, token: bytes) -> None:
        if (problem := self.holders.objection(here.name, token)) is not None:
            self._send(key, TurnedAway(problem))
            return
        guest = self.guests[key] = JoinedHost(key, here, heard=time.monotonic(), token=token)
        self._tell(HostCame(guest))
        self._welcome(guest)

    def _welcome(self, guest: JoinedHost) -> None:
        if self._load is not None:
            self._send(guest.key, self._load)

    def _ping(self, now: float) -> None:
        self._number += 1
        for key, guest in list(self.guests.items()):
            if now - guest.heard > (IDLE_S if self._load is None else self._load.lease_s):
                silent = f"host {guest.here.name} has not answered for {now - guest.heard:.1f} s"
                self._give_up(key, silent, HostDropped(silent))
                continue
            self._send(key, Ping(self._number))

    def _give_up(self, key: str, because: str, told: HostDropped | TurnedAway) -> None:
        if self.guests.pop(key, None) is not None:
            self._rests(key)
            self._send(key, told)
            self._tell(HostGone(key, because))

    def _send(self, key: str, message: ToHost) -> None:
        self.router.send(bytes.fromhex(key), encode(message))

    def _tell(self, happening: Happening) -> None:
        self.happenings.put(happening)
        os.eventfd_write(self.event, 1)
