# SPDX-License-Identifier: Apache-2.0
"""A socket that strangers can reach: what they can make us hold is bounded before it is read.

Only clients with a key that is known are heard (CURVE). A frame longer than `most_bytes` ends its
connection before room is made for it, a handshake that takes longer than HANDSHAKE_MS too. Of
connections that have not said anything yet there are MOST_UNPROVEN at most: when more come, the
oldest of whoever has most of them is ended, so descriptors are left for the run. Messages have one
part; a connection of which more has arrived than MOST_WAITING messages, unread, is ended too. (A
frame's limit is no limit of a message: parts are kept, however many, until the last has come.)

So strangers can have MOST_UNPROVEN * most_bytes of our memory, a holder of the key
MOST_WAITING * most_bytes for each connection. ZeroMQ cannot count connections by itself: a thread
follows its reports, each of which has the descriptor.
"""

import os
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import parse_monitor_message

from manyhands.values.credentials import OnlyThisKey
from manyhands.values.refusals import Refusals

HANDSHAKE_MS = 5000
MOST_UNPROVEN = 64
MOST_WAITING = 64
LOOK_S = 0.25
"""How often it is looked at how much has arrived."""

_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_SEEN = zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _REFUSED
_TCP_INFO_BYTES, _BYTES_RECEIVED = 192, struct.Struct("<128xQ")
"""tcp_info, and where in it the kernel (4.1 or newer) says how much it has received."""

T = TypeVar("T")


@dataclass(slots=True)
class _Connection:
    address: str
    proven: bool = False
    """It has said something, so it has the key."""
    read: int = 0
    """Bytes of it that were given out."""


class KeyCheck(Protocol):
    """The authenticator's question, from a thread of its own: may a client with this key speak?"""

    def callback(self, domain: str, key: bytes) -> bool: ...


class GuardedRouter:
    """`bind`, `receive` and `send` belong to one thread."""

    def __init__(
        self, public: bytes, secret: bytes, client: bytes | KeyCheck, *, most_bytes: int
    ) -> None:
        """The server's keys, and the public one of those who may speak, or who knows these."""
        self.context: zmq.Context[Any] = zmq.Context()
        self.auth = ThreadAuthenticator(self.context)
        self.auth.start()
        check = OnlyThisKey(client) if isinstance(client, bytes) else client
        self.auth.configure_curve_callback(domain="*", credentials_provider=check)
        self.socket: zmq.Socket[bytes] = self.context.socket(zmq.ROUTER)
        self.socket.curve_server = True
        self.socket.curve_publickey, self.socket.curve_secretkey = public, secret
        self.socket.maxmsgsize, self.socket.handshake_ivl = most_bytes, HANDSHAKE_MS
        self.socket.linger = 0
        self.refusals = Refusals()
        self._most_unread = MOST_WAITING * most_bytes
        self._from = ""
        """The address of who sent what was received last."""
        self.key = b""
        """And the public key, which CURVE has proven."""
        self._lock = threading.Lock()
        self.connections: dict[int, _Connection] = {}
        """By descriptor."""
        self._quiet = 0
        """Those that have proven who they are (nobody says which) and said nothing yet."""
        self._handle = _Handle()
        self._monitor: zmq.Socket[bytes] = self.context.socket(zmq.PAIR)
        self._monitor.rcvhwm = 0  # else whoever tells us would wait for us to listen
        address = f"inproc://door-{id(self)}"
        self.socket.monitor(address, _SEEN)
        self._monitor.connect(address)
        self._stop = os.eventfd(0)
        self._thread = threading.Thread(target=self._watch, name="door", daemon=True)
        self._thread.start()

    def bind(self, addresses: Sequence[str], port: int = 0) -> int:
        """Listen at all of these addresses, on one port: the one given, or any."""
        self.socket.ipv6 = any(":" in address for address in addresses)
        first, *others = map(bracketed, addresses)
        if port:
            self.socket.bind(f"tcp://{first}:{port}")
        else:
            port = self.socket.bind_to_random_port(f"tcp://{first}")
        for address in others:
            self.socket.bind(f"tcp://{address}:{port}")
        self.refusals.where = f"{first}:{port}"
        return port

    def receive(self) -> tuple[bytes, bytes] | None:
        """Who speaks, and what; None: nobody does. Never blocks."""
        while True:
            try:
                sender, *parts = self.socket.recv_multipart(flags=zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return None
            descriptor = self._heard(parts)
            if len(parts) == 1:
                return sender.bytes, parts[0].bytes
            self.refuse()
            with self._lock:
                self._end(descriptor)

    def refuse(self) -> None:
        """What was received last made no sense."""
        self.refusals.messages += 1
        self.refusals.note(self._from)

    def send(self, to: bytes, data: bytes) -> None:
        """What cannot be sent at once is kept, or left out: nobody waits."""
        with suppress(zmq.ZMQError):
            self.socket.send_multipart([to, data], flags=zmq.NOBLOCK)

    def close(self) -> None:
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        self.socket.disable_monitor()
        self._monitor.close(0)
        self.socket.close()
        self.auth.stop()
        self.context.term()
        self._handle.close()
        os.close(self._stop)

    def _heard(self, parts: Sequence[zmq.Frame]) -> int:
        """From which descriptor."""
        if not parts:
            return -1
        descriptor = int(parts[0].get(zmq.SRCFD))
        self._from = plain_address(str(parts[0].get("Peer-Address")))
        self.key = str(parts[0].get("User-Id")).encode()
        with self._lock:
            # One that the thread has not seen yet is proven by what it says next.
            if (connection := self.connections.get(descriptor)) is not None:
                if not connection.proven:
                    connection.proven, self._quiet = True, max(0, self._quiet - 1)
                connection.read += sum(map(len, parts))
        return descriptor

    # ---- the thread

    def _watch(self) -> None:
        poller = zmq.Poller()
        poller.register(self._monitor, zmq.POLLIN)
        poller.register(self._stop, zmq.POLLIN)
        due = 0.0
        while True:
            ready = dict(poller.poll(int(1000 * LOOK_S)))
            if self._stop in ready:
                return
            if self._monitor in ready:
                seen = parse_monitor_message(self._monitor.recv_multipart())
                with self._lock:
                    self._see(seen["event"], int(seen["value"]))
            if time.monotonic() >= due:
                due = time.monotonic() + LOOK_S
                with self._lock:
                    self._end_floods()

    def _see(self, event: int, value: int) -> None:
        if event == zmq.EVENT_ACCEPTED:
            self.connections[value] = _Connection(self._handle.of(value, _peer) or "")
            self._make_room()
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._quiet += 1
        elif event == zmq.EVENT_DISCONNECTED:
            gone = self.connections.pop(value, None)
            if gone is None or gone.proven:
                return
            if self._quiet:  # one of ours that went before it had said anything
                self._quiet -= 1
                return
            self.refusals.connections += 1
            self.refusals.note(gone.address)
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH or _is_another_key(value):
            self.refusals.keys += 1

    def _make_room(self) -> None:
        unproven = {fd: c.address for fd, c in self.connections.items() if not c.proven}
        if len(unproven) <= MOST_UNPROVEN:
            return
        ((most, _),) = Counter(unproven.values()).most_common(1)
        oldest = next(fd for fd, address in unproven.items() if address == most)
        self._end(oldest)
        del self.connections[oldest]
        self.refusals.connections += 1
        self.refusals.crowd += 1
        self.refusals.note(most)

    def _end_floods(self) -> None:
        for descriptor, connection in list(self.connections.items()):
            received = self._handle.of(descriptor, _received) or 0
            if received - connection.read > self._most_unread:
                self._end(descriptor)
                self.refusals.floods += 1
                self.refusals.note(connection.address)

    def _end(self, descriptor: int) -> None:
        """ZeroMQ finds it ended, and tells us so."""
        self._handle.of(descriptor, _shut)


class _Handle:
    """Looks at a descriptor of somebody else's, who may close it meanwhile. Needs none of its own
    for it: there may be none left."""

    def __init__(self) -> None:
        self._nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._mine = os.dup(self._nothing)

    def of(self, descriptor: int, look: Callable[[socket.socket], T]) -> T | None:
        """None: it is no connection any more."""
        sock = None
        try:
            os.dup2(descriptor, self._mine, inheritable=False)
            sock = socket.socket(fileno=self._mine)
            return look(sock)
        except OSError:
            return None
        finally:
            if sock is not None:
                sock.detach()
            os.dup2(self._nothing, self._mine, inheritable=False)

    def close(self) -> None:
        os.close(self._mine)
        os.close(self._nothing)


def _peer(sock: socket.socket) -> str:
    return plain_address(sock.getpeername()[0])


def _received(sock: socket.socket) -> int:
    (size,) = _BYTES_RECEIVED.unpack_from(
        sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    )
    return size


def _shut(sock: socket.socket) -> None:
    sock.shutdown(socket.SHUT_RDWR)


def _is_another_key(value: int) -> bool:
    return value == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC


def plain_address(address: str) -> str:
    return address.removeprefix("::ffff:")


def bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address
