# SPDX-License-Identifier: Apache-2.0
"""One connection to another host, and the frames that travel on it. Nothing here waits.

A frame is a header (view, kind, turn, length) and what follows it, read straight into where it
belongs. A kernel breaks a connection whose other side lives and reads nothing for some time
(TCP_USER_TIMEOUT counts a closed window), so more than EAGER_BYTES are only sent to one that has
said that it is reading: its own header of the same turn has come.

On a connection with keys all of it is sealed: the header as a piece of its own, what follows in
pieces that are sealed as the kernel takes them and opened straight into where they belong.
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

from manyhands.training.collective.handshake import FAREWELL, PeerLink
from manyhands.training.collective.sealing import PIECE_BYTES, TAG_BYTES, Seal
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
_SEALED_HEADER = _HEADER.size + TAG_BYTES
_MOST_BUFFERS = 512

SendBuffers = list[memoryview]


class Connection:
    """What is still to be sent to one host and received from it in the turn under way."""

    def __init__(self, rank: int, link: PeerLink, generation: int) -> None:
        self.rank, self.socket, self.generation = rank, link.socket, generation
        self._farewell, self._their_farewell = link.farewell, link.their_farewell
        self._seal = None if link.keys is None else Seal(link.keys)
        self._clear: SendBuffers = []  # to be sealed
        self._sealed_head = memoryview(bytearray(_SEALED_HEADER))
        self._piece: memoryview | None = None  # under way
        self._to_fill: SendBuffers = []  # with what will be opened
        self._tail = b""  # as much as a farewell has, of what was received sealed
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
        return bool(self._out or self._into or self._held or self._clear)

    def begin(self, kind: int, send: SendBuffers | None, receive: SendBuffers | None) -> None:
        """A frame in each direction; None for none."""
        if send is not None:
            self._sent += 1
            size = sum(map(len, send))
            header = self._header(kind, self._sent, size)
            if self._seal is not None:
                self._send_sealed(self._seal, header, send, size)
            elif size <= EAGER_BYTES:
                self._out, self._held = [memoryview(header), *send], []
            else:
                self._out, self._held = [memoryview(header)], send
        if receive is not None:
            self._received += 1
            size = sum(map(len, receive))
            self._expected = self._header(kind, self._received, size)
            self._bytes_in, self._bytes_due = 0, _HEADER.size + size
            if self._seal is not None:
                self._receive_sealed(self._seal, receive, size)
                return
            self._into, self._later, self._body = [self._head], receive, receive
            if size <= EAGER_BYTES:
                self._into, self._later = self._into + receive, []

    def push(self) -> bool:
        """Whether something could be sent; OSError when nothing ever will."""
        if not self._out and self._clear and self._seal is not None:
            self._out = [self._seal.seal(self._clear)]
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
        self._bytes_in += size
        if self._seal is not None:
            self._tail = (self._tail + _end_of(self._into, size))[-len(FAREWELL) :]
            _advance(self._into, size)
            self._open(self._seal)
        else:
            _advance(self._into, size)
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
            return not self.socket.recv(2 * EAGER_BYTES, socket.MSG_PEEK).endswith(
                self._their_farewell
            )
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
        self._fate = LEFT if last == self._their_farewell else LOST
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
                self._said_farewell = self.socket.send(self._farewell) > 0
                self.socket.shutdown(socket.SHUT_WR)
            if not self._out and not self._clear:
                return True
            unsent = fcntl.ioctl(self.socket, termios.TIOCOUTQ, bytes(4))
            return unsent == bytes(4)
        except BlockingIOError:
            return False
        except OSError:
            return True

    # ---- sealed

    def _send_sealed(self, seal: Seal, header: bytes, send: SendBuffers, size: int) -> None:
        sealed = memoryview(bytearray(_SEALED_HEADER))
        seal.seal_into(header, sealed)
        self._out, self._held = [sealed], send if size else []
        if 0 < size <= EAGER_BYTES:
            self._out, self._held = [sealed, seal.seal(list(send))], []

    def _receive_sealed(self, seal: Seal, receive: SendBuffers, size: int) -> None:
        self._bytes_due = _SEALED_HEADER + size + -(-size // PIECE_BYTES) * TAG_BYTES
        self._into, self._piece = [self._sealed_head], None
        self._to_fill = [buffer for buffer in receive if len(buffer)]
        if 0 < size <= EAGER_BYTES:
            self._piece = seal.room(size)
            self._into.append(self._piece)

    def _open(self, seal: Seal) -> None:
        """All that has come whole."""
        if self._expected:
            if self._bytes_in < _SEALED_HEADER:
                return
            seal.open_into(self._sealed_head, self._head)
            self._check(bytes(self._head))
        if self._into:
            return
        if self._piece is not None:
            seal.open(self._piece, self._to_fill)
            self._piece = None
        if self._to_fill:
            self._piece = seal.room(sum(map(len, self._to_fill)))
            self._into = [self._piece]

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
        if found == self._their_farewell:
            raise ConnectionResetError("it ended")
        if found != self._expected:
            raise Broken(
                f"hosts disagree about what they do: host {self.rank} sent {_told(found)} "
                f"where {_told(self._expected)} was expected"
            )
        if self._seal is not None:
            self._clear = list(self._held)
        else:
            self._into += self._later
            self._out += self._held
        self._expected, self._later, self._held = b"", [], []

    def _last_received(self) -> bytes:
        """As many bytes as a farewell has."""
        if self._seal is not None:
            return self._tail
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


def _end_of(buffers: SendBuffers, size: int) -> bytes:
    """The last of the first `size` bytes; as many as a farewell has, if there are."""
    end = b""
    for buffer in buffers:
        part = buffer[:size]
        end = (end + bytes(part[-len(FAREWELL) :]))[-len(FAREWELL) :]
        size -= len(part)
        if not size:
            break
    return end


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
