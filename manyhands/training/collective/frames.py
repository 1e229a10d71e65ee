# SPDX-License-Identifier: Apache-2.0
"""One connection to another host, and the frames that travel on it. Nothing here waits.

A frame is a header (view, kind, turn, length) and what follows it, read straight into where it
belongs. A kernel breaks a connection whose other side lives and reads nothing for some time
(TCP_USER_TIMEOUT counts a closed window), so more than EAGER_BYTES are only sent to one that has
said that it is reading: its own header of the same turn has come.
"""

import fcntl
import select
import socket
import struct
import termios
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import cast

from manyhands.training.collective.handshake import FAREWELL
from manyhands.values.errors import Broken

KINDS = ("gather", "exchange", "share", "measure")
GATHER, EXCHANGE, SHARE, MEASURE = range(len(KINDS))

EAGER_BYTES = 24 << 10
"""Two frames of this size fit into what a kernel takes in for a process that does not read."""

WAKE_BYTES = 128 << 10
"""Nobody is woken for less, as long as more is to come: on a slow link that halves the work."""

LEAVE_S = 0.05
HERE, LEFT, LOST = "here", "left", "lost"

_MAGIC = b"mhfr"
_HEADER = struct.Struct("<4sIqQQ")  # magic, kind, generation, turn, length of what follows
_MOST_BUFFERS = 512

SendBuffers = list[memoryview]


class Connection:
    """What is still to be sent to one host and received from it in the turn under way."""

    def __init__(self, rank: int, sock: socket.socket, generation: int) -> None:
        self.rank, self.socket, self.generation = rank, sock, generation
        self._sent = self._received = 0
        self._out: SendBuffers = []
        self._held: SendBuffers = []  # until the other is reading
        self._into: SendBuffers = []
        self._later: SendBuffers = []  # what comes after the header
        self._body: SendBuffers = []
        self._head = memoryview(bytearray(_HEADER.size))
        self._expected = b""  # until it has come
        self._bytes_in = self._bytes_due = 0
        self._wakes_at = 1
        self._fate = HERE
        self._said_farewell = False

    @property
    def busy(self) -> bool:
        return bool(self._out or self._into or self._held)

    def begin(self, kind: int, send: SendBuffers | None, receive: SendBuffers | None) -> None:
        """A frame in each direction; None for none."""
        if send is not None:
            self._sent += 1
            size = sum(map(len, send))
            self._out, self._held = [memoryview(self._header(kind, self._sent, size))], send
            if size <= EAGER_BYTES:
                self._out, self._held = self._out + send, []
        if receive is not None:
            self._received += 1
            size = sum(map(len, receive))
            self._expected = self._header(kind, self._received, size)
            self._bytes_in, self._bytes_due = 0, _HEADER.size + size
            self._into, self._later, self._body = [self._head], receive, receive
            if size <= EAGER_BYTES:
                self._into, self._later = self._into + receive, []

    def push(self) -> bool:
        """Whether something could be sent; OSError when nothing ever will."""
        if not self._out:
            return False
        try:
            _advance(self._out, self.socket.sendmsg(self._out[:_MOST_BUFFERS]))
        except BlockingIOError:
            return False
        return True

    def pull(self) -> bool:
        """Whether something was received."""
        if not self._into:
            return False
        try:
            size = self.socket.recvmsg_into(self._into[:_MOST_BUFFERS])[0]
        except BlockingIOError:
            return False
        if size == 0:
            raise ConnectionResetError("it ended")
        _advance(self._into, size)
        self._bytes_in += size
        if self._expected and self._bytes_in >= _HEADER.size:
            self._check(bytes(self._head))
        much = not self._expected and self._bytes_due - self._bytes_in >= WAKE_BYTES
        self._wake_at(WAKE_BYTES if much else 1)
        return True

    def is_gone(self) -> bool:
        """Between two frames: whether the other has died. One that has left may be needed no more.

        Takes nothing from what is still to be read.
        """
        if not self._hung_up():
            return False
        try:
            return not self.socket.recv(2 * EAGER_BYTES, socket.MSG_PEEK).endswith(FAREWELL)
        except OSError:
            return True

    def fate(self) -> str:
        """HERE, LEFT or LOST. Nothing more can be received from one that is not here."""
        if self._fate != HERE or not self._hung_up():
            return self._fate
        last = self._last_received()
        with suppress(OSError):
            while part := self.socket.recv(1 << 20):
                last = (last + part)[-len(FAREWELL) :]
        self._fate = LEFT if last == FAREWELL else LOST
        return self._fate

    def take_leave(self) -> bool:
        """Whether the socket can be closed without harm; else to be tried again soon.

        Also in the middle of a frame: then the farewell comes before what was promised. It must
        have arrived, for closing a socket in which something is unread throws away what is unsent.
        """
        if self._hung_up():  # nobody listens any more
            return True
        try:
            if not self._said_farewell:
                self._said_farewell = self.socket.send(FAREWELL) > 0
                self.socket.shutdown(socket.SHUT_WR)
            if not self._out:
                return True
            unsent = fcntl.ioctl(self.socket, termios.TIOCOUTQ, bytes(4))
            return unsent == bytes(4)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def _wake_at(self, size: int) -> None:
        if size != self._wakes_at:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)
            self._wakes_at = size

    def _hung_up(self) -> bool:
        poll = select.poll()
        poll.register(self.socket, select.POLLRDHUP)
        return bool(poll.poll(0))

    def _header(self, kind: int, turn: int, size: int) -> bytes:
        return _HEADER.pack(_MAGIC, kind, self.generation, turn, size)

    def _check(self, found: bytes) -> None:
        if found == FAREWELL:
            raise ConnectionResetError("it ended")
        if found != self._expected:
            raise Broken(
                f"hosts disagree about what they do: host {self.rank} sent {_told(found)} "
                f"where {_told(self._expected)} was expected"
            )
        self._into += self._later
        self._out += self._held
        self._expected, self._later, self._held = b"", [], []

    def _last_received(self) -> bytes:
        """As many bytes as a farewell has."""
        last, size = b"", self._bytes_in
        for buffer in (self._head, *self._body):
            last = (last + bytes(buffer[:size][-len(FAREWELL) :]))[-len(FAREWELL) :]
            size = max(0, size - len(buffer))
        return last


def close_all(lines: Sequence[Connection]) -> None:
    """With a farewell to those who listen, so that nobody is taken for dead. In LEAVE_S at most."""
    until, staying = time.monotonic() + LEAVE_S, list(lines)
    while staying := [line for line in staying if not line.take_leave()]:
        if time.monotonic() > until:
            break
        time.sleep(LEAVE_S / 50)
    for line in lines:
        line.socket.close()


def _told(header: bytes) -> str:
    magic, kind, generation, turn, size = cast(
        tuple[bytes, int, int, int, int], _HEADER.unpack(header)
    )
    if magic != _MAGIC or kind >= len(KINDS):
        return "something else"
    return f"{KINDS[kind]} {turn} of view {generation} ({size} bytes)"


def _advance(buffers: SendBuffers, size: int) -> None:
    done = 0
    for buffer in buffers:
        if size < len(buffer):
            break
        size -= len(buffer)
        done += 1
    del buffers[:done]
    if size:
        buffers[0] = buffers[0][size:]
