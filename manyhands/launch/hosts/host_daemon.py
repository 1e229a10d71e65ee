# SPDX-License-Identifier: Apache-2.0
"""A host's own end: joins a run, starts and kills workers as told, and holds their memory.

A host daemon is bound to the driver by a lease. When it has heard nothing for that long, it kills
its workers and forgets their memory: a host that is cut off does not go on training alone. Then it
tries to join anew, as somebody the driver has never seen, until its own patience ends.
"""

import errno
import os
import platform
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import zmq
from zmq.utils.monitor import recv_monitor_message

from manyhands.launch.engines.fork_agent import KillWorker, StartWorker, WorkerExit
from manyhands.launch.engines.launcher import WORKER, HostNews, LauncherWarning
from manyhands.launch.engines.local_processes import Local
from manyhands.launch.engines.memory_segments import create_segments
from manyhands.launch.hosts.carried_logs import LogsToSend
from manyhands.launch.hosts.join_protocol import (
    IDLE_S,
    PIECE_BYTES,
    PING_S,
    Blank,
    Blanked,
    Bye,
    Echo,
    FilePiece,
    FromHost,
    Going,
    Here,
    HostDropped,
    Load,
    LogTaken,
    Ping,
    ProbeAnswer,
    ProbeQuestion,
    Settled,
    TurnedAway,
    Want,
    decode_to_host,
    encode,
)
from manyhands.launch.hosts.message_digest import message_digest
from manyhands.launch.hosts.probe_process import Probe
from manyhands.launch.shipping.ship_files import Unpacking
from manyhands.launch.wire.bulk_window import BulkWindow
from manyhands.values.bounded_types import NotUnderstood
from manyhands.values.errors import RequestError
from manyhands.values.guarded_router import bracketed
from manyhands.values.join_token import JoinToken
from manyhands.values.machine import machine, torch_version
from manyhands.values.scratch_folder import Scratch, sweep
from manyhands.values.version import VERSION

_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH
_HUNG_UP = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
MOST_HANG_UPS = 5
"""In a row: with another token we do not even know whom we speak to, and are hung up on."""
SHORT_STAY_S = 10.0
LEAST_AWAY_S, MOST_AWAY_S = 0.25, 30.0
HAND_OVER_S = 8.0
"""How long workers of a host that was told to go may take; whoever asks twice does not wait."""

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Offer:
    """What a host brings, and how it reaches the driver."""

    host: str
    port: int
    token: JoinToken
    slots: int
    name: str
    address: str = ""
    """Where workers of other hosts reach ours; left out: where the driver is reached from."""
    patience_s: float = 60.0
    """How long to look for a driver that is not there (any more)."""
    tied: bool = False
    """To standard input: when it ends, so does the daemon."""
    entry: str = WORKER


class _Lost(Exception):
    """The driver is not there any more, or does not want us: try again as somebody new."""

    def __init__(self, because: str, wait_s: float = 0.0) -> None:
        super().__init__(because)
        self.wait_s = wait_s


def serve(offer: Offer, say: Say = print) -> int:
    """Until the run is over (0), or the driver could not be found any more (1)."""
    sweep()
    with _asked_to_go(tied=offer.tied) as asked, _launcher(offer.entry) as hands:
        since, wait_s = time.monotonic(), 0.0
        say(f"looking for a run at {offer.host}:{offer.port}")
        while not asked():
            visit, came = _Visit(offer, hands, say, asked), time.monotonic()
            try:
                return visit.stay()
            except _Lost as lost:
                hands.stop()
                wait_s = stay_away_s(lost.wait_s, time.monotonic() - came, wait_s)
                if visit.welcome:
                    later = f" in {wait_s:.0f} s" if wait_s >= 1 else ""
                    say(f"{lost}. Workers here were stopped; trying to join again{later}.")
                _rest(wait_s, asked)
                if visit.welcome:
                    since = time.monotonic()
                if time.monotonic() - since > offer.patience_s:
                    say(f"no run at {offer.host}:{offer.port} for {offer.patience_s:.0f} s: {lost}")
                    return 1
            finally:
                visit.close()
        return 130


def stay_away_s(told_s: float, stayed_s: float, before_s: float) -> float:
    """How long to wait before joining again: as long as one was told to, and each time twice as
    long (`before_s` was the last time) as long as one is sent away soon after one came."""
    if stayed_s > SHORT_STAY_S:
        return told_s
    return max(told_s, min(MOST_AWAY_S, 2 * before_s or LEAST_AWAY_S))


def _rest(seconds: float, asked: Callable[[], int]) -> None:
    until = time.monotonic() + seconds
    while not asked() and (left := until - time.monotonic()) > 0:
        time.sleep(min(left, 0.1))


@contextmanager
def _launcher(entry: str) -> Generator[Local]:
    hands = Local(entry, create_segments())
    try:
        yield hands
    finally:
        hands.close()


class _Visit:
    """One time of being a run's host: from saying that we are here to being gone."""

    def __init__(self, offer: Offer, hands: Local, say: Say, asked: Callable[[], int]) -> None:
        self.offer, self.hands, self.say, self.asked = offer, hands, say, asked
        self.context = zmq.Context()
        self.socket: zmq.Socket[bytes] = self.context.socket(zmq.DEALER)
        self.socket.identity = uuid.uuid4().bytes
        self.socket.curve_serverkey = offer.token.driver
        self.socket.curve_publickey, self.socket.curve_secretkey = offer.token.pair
        self.socket.linger, self.socket.ipv6 = 500, True
        self.socket.reconnect_ivl, self.socket.handshake_ivl = 250, 5000
        self.monitor = self.socket.get_monitor_socket(_REFUSED | _HUNG_UP)
        self.hang_ups = 0
        self.welcome = False
        """The driver has spoken to us."""
        self.load: Load | None = None
        self.asked_for = self.arrived = 0
        self.window = BulkWindow()
        self.settled = False
        self.going_since = 0.0
        self.scratch: Scratch | None = None
        """What is written here for a run whose folder this host does not see."""
        self.unpacking: Unpacking | None = None
        self.logs = LogsToSend()
        self.poller = zmq.Poller()
        self.probe: Probe | None = None
        self.lease_s = min(IDLE_S, offer.patience_s)
        self.heard = time.monotonic()
        self.socket.connect(f"tcp://{bracketed(offer.host)}:{offer.port}")

    def stay(self) -> int:
        self._tell(self._here())
        for what in (self.socket, self.monitor, self.hands.fileno()):
            self.poller.register(what, zmq.POLLIN)
        last = time.monotonic()
        while True:
            self.poller.poll(int(PING_S * 1000))
            now = time.monotonic()
            if now - last > 4 * PING_S:  # it was we who did not listen: read before judging
                self.heard = max(self.heard, now - self.lease_s / 2)
            last = now
            if (code := self._listen()) is not None:
                return code
            self._settle_when_unpacked()
            self._pass_on_findings()
            for sign in self.hands.poll():
                if isinstance(sign, WorkerExit):
                    self.logs.end(sign)
                elif not isinstance(sign, HostNews | LauncherWarning):
                    self._tell(sign)
            self._tell_all(self.logs.more())
            self._tell_all(self.logs.ends())
            if self.asked() and self._handed_over():
                self._tell_all(self.logs.ends(at_once=True))
                self._tell(Bye(f"host {self.offer.name} was told to go"))
                return 130
            if time.monotonic() - self.heard > self.lease_s:
                raise _Lost(f"nothing was heard of the driver for {self.lease_s:g} s")

    def _handed_over(self) -> bool:
        """Workers are told to go, and have gone; or there is no more time for it."""
        if not self.going_since:
            self.going_since = time.monotonic()
            self._tell(Going())
            for pid in filter(None, self.hands.alive.values()):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
        late = time.monotonic() - self.going_since > HAND_OVER_S
        return not self.hands.alive or late or self.asked() > 1

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close()
        self.context.term()
        self._forget_files()
        if self.probe is not None:
            self.probe.close()
        if self.scratch is not None:
            self.scratch.close()

    # ---- speaking

    def _here(self) -> Here:
        offer, mine = self.offer, machine()
        return Here(
            name=offer.name,
            slots=offer.slots,
            memory_bytes=mine.memory_bytes,
            address=offer.address or address_towards(offer.host),
            version=VERSION,
            torch=torch_version(),
            python=platform.python_version(),
            messages=message_digest(),
        )

    def _tell(self, *messages: FromHost) -> None:
        self._tell_all(messages)

    def _tell_all(self, messages: Iterable[FromHost]) -> None:
        with suppress(zmq.ZMQError):
            for message in messages:
                self.socket.send(encode(message), flags=zmq.NOBLOCK)

    # ---- listening

    def _listen(self) -> int | None:
        """Everything that has arrived; an exit code when it is over."""
        with suppress(zmq.Again):
            while True:
                seen = recv_monitor_message(self.monitor, flags=zmq.NOBLOCK)
                if seen["event"] == _HUNG_UP:
                    hung_up = seen["value"] in (errno.EPIPE, errno.ECONNRESET)
                    self.hang_ups += hung_up and not self.welcome
                    if self.hang_ups < MOST_HANG_UPS:
                        continue
                raise RequestError(
                    f"the run at {self.offer.host}:{self.offer.port} does not accept this token. "
                    "Use the token file of that run; if it is that, it was withdrawn."
                )
        newest: Ping | None = None
        with suppress(zmq.Again):
            while True:
                data = self.socket.recv(flags=zmq.NOBLOCK)
                self.heard = time.monotonic()
                try:
                    message = decode_to_host(data)
                except NotUnderstood:
                    continue
                if isinstance(message, Ping):
                    newest = message
                    continue
                if (code := self._obey(message)) is not None:
                    return code
        if newest is not None:
            if not self.welcome:
                self.welcome = True
                self.say(f"joined the run at {self.offer.host}:{self.offer.port}")
            self._tell(Echo(newest.number))
        return None

    def _obey(self, message: object) -> int | None:
        match message:
            case Load():
                self._begin(message)
            case FilePiece(offset=offset, data=data):
                self._take(offset, data)
            case StartWorker(worker=worker, orders=orders, log=log):
                path = Path(self.load.run if self.load else "", "logs", Path(log).name)
                if self.scratch is not None:
                    path = self.scratch.path / f"worker-{worker}.log"
                    self.logs.begin(worker, path)
                self.hands.fork(worker, orders, path)
            case LogTaken():
                self.logs.taken()
            case KillWorker(worker=worker):
                self.hands.kill(worker)
            case ProbeQuestion(line=line):
                self._inquire(line)
            case Blank():
                self.hands.stop()
                self.load, self.lease_s = None, IDLE_S
                self._forget_files()
                self.logs.clear()
                self._tell(Blanked())
            case HostDropped(because=because, wait_s=wait_s):
                raise _Lost(because, wait_s)
            case TurnedAway(because=because):
                self.hands.stop()
                raise RequestError(because)
            case Bye(because=because):
                self.say(because)
                return 0
            case _:
                pass
        return None

    def _begin(self, load: Load) -> None:
        self.load, self.lease_s = load, load.lease_s
        self.asked_for = self.arrived = 0
        self.window = BulkWindow()
        self.settled = False
        if not Path(load.run, load.marker).exists() and self.scratch is None:
            self.scratch = Scratch("run")
        self._ask_on()

    def _ask_on(self) -> None:
        assert self.load is not None
        while self.window.open and self.asked_for < self.load.end:
            self._tell(Want(self.asked_for))
            self.window.asked(time.monotonic())
            self.asked_for += PIECE_BYTES
        if self.arrived < self.load.end:
            return
        if self.load.files:
            self._forget_files()
            self.unpacking = Unpacking(self.hands.fds[0], self.load.files, self.load.end)
            self.hands.folder = str(self.unpacking.folder)
        else:
            self._settle()

    def _settle_when_unpacked(self) -> None:
        if self.unpacking is None or self.load is None or self.settled:
            return
        try:
            if self.unpacking.done():
                self._settle()
        except RequestError as error:
            self._tell(Bye(f"host {self.offer.name}: {error}"))
            raise

    def _settle(self) -> None:
        assert self.load is not None
        self.settled, shares = True, self.scratch is None
        run = self.load.run if self.scratch is None else str(self.scratch.path)
        self._tell(Settled(fds=self.hands.fds, run=run, shares=shares))

    def _forget_files(self) -> None:
        self.hands.folder = ""
        if self.unpacking is not None:
            self.unpacking.scratch.close()
            self.unpacking = None

    def _take(self, offset: int, data: bytes) -> None:
        if self.load is None or offset != self.arrived:
            return
        data = data[: self.load.end - offset]
        os.pwrite(self.hands.fds[0], data, offset)
        self.arrived += len(data)
        self.window.came(time.monotonic())
        self._ask_on()

    def _inquire(self, line: bytes) -> None:
        if self.probe is None:
            self.probe = Probe()
            self.poller.register(self.probe.fileno(), zmq.POLLIN)
        self.probe.tell(line)

    def _pass_on_findings(self) -> None:
        if self.probe is None:
            return
        for line in self.probe.lines():
            self._tell(ProbeAnswer(line))
        if self.probe.ended is not None:
            self._tell(ProbeAnswer(b"", self.probe.ended))
            self.poller.unregister(self.probe.fileno())
            self.probe.close()
            self.probe = None


def address_towards(host: str) -> str:
    """This host's own address on the way to another."""
    try:
        family, kind, _, _, there = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(there)
            return probe.getsockname()[0]
    except OSError as error:
        raise RequestError(f"{host} cannot be reached from here: {error}") from error


@contextmanager
def _asked_to_go(*, tied: bool) -> Generator[Callable[[], int]]:
    """SIGTERM, SIGINT, SIGHUP, and (`tied`) the end of standard input: how often we were asked."""
    asked: list[int] = []
    before: dict[Literal[1, 2, 15] | int, object] = {}

    def note(number: int, frame: object) -> None:
        asked.append(number)

    def read_on() -> None:
        while os.read(sys.stdin.fileno(), 1 << 12):
            pass
        asked.append(signal.SIGHUP)

    if tied:
        threading.Thread(target=read_on, name="tied", daemon=True).start()
    with suppress(ValueError):  # not in the main thread: whoever runs us tells us otherwise
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            before[number] = signal.signal(number, note)
    try:
        yield lambda: len(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
