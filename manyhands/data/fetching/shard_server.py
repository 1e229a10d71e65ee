# SPDX-License-Identifier: Apache-2.0
"""Shards from host to host: a server of what manifests list, and the client that asks it.

Connections are encrypted and authenticated (CURVE). All keys come from one secret of the run: who
does not have it cannot connect, and a server that does not have it is not believed. A request names
a shard by its content and a range in it; no path ever travels. Neither side holds more than WINDOW
pieces for the other, however slow that is. A server that is just fetching what it is asked for
says so, and is asked again.

What arrives is not checked here: the caller compares every block with the manifest.
"""

import os
import threading
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from pathlib import Path

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from manyhands.data.fetching.shard_cache import Cache, key_of
from manyhands.data.shards.manifest import BLOCK_BYTES, ShardInfo
from manyhands.values.credentials import Credentials
from manyhands.values.errors import DataError

PIECE_BYTES = 256 << 10
"""What is asked for at a time. A link that brings one piece per timeout is slow, but not dead."""
WINDOW = 8
"""Pieces that a client has asked for and not received yet."""
TIMEOUT_S = 5.0
"""A peer that sends nothing for so long is given up on."""
PATIENCE_S = 60.0
"""... and one that is still fetching the shard itself after so long."""
ASK_AGAIN_S = 0.05

_COMING = "it is still fetching it"
_REQUEST_BYTES = 4096
_HANDSHAKE_MS = 5000
_GONE = (
    zmq.EVENT_CLOSED  # nobody listens there
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)


class _OnlyThisKey:
    """The authenticator's question: may this client speak?"""

    def __init__(self, public: bytes) -> None:
        self.public = public

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self.public


class _Coming(FileNotFoundError):
    """The peer does not have it yet."""


class _ShardRequest(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    key: str
    start: int


class _PieceHead(msgspec.Struct, frozen=True, array_like=True):
    """What comes before the bytes of a piece; `why` there are none, or that they are coming."""

    start: int
    why: str = ""
    coming: bool = False


_encode = msgspec.msgpack.Encoder().encode
_decode_ask = msgspec.msgpack.Decoder(_ShardRequest).decode
_decode_head = msgspec.msgpack.Decoder(_PieceHead).decode


def _never(info: ShardInfo) -> bool:
    return False


class ShardServer:
    """Serves these shards, from a prepared folder or a cache, until it is closed.

    `address` is where it listens; on all interfaces ("tcp://0.0.0.0:0") the caller knows better
    under which name others reach this host. `coming` is asked, in the server's thread, whether a
    shard that is not here soon will be; it must not block."""

    def __init__(
        self,
        store: Path | Cache,
        shards: Iterable[ShardInfo],
        credentials: Credentials,
        bind: str = "tcp://127.0.0.1:0",
        coming: Callable[[ShardInfo], bool] = _never,
    ) -> None:
        self.store, self.coming = store, coming
        self.shards = {key_of(shard): shard for shard in shards}
        self.context = zmq.Context()
        self.auth = ThreadAuthenticator(self.context)
        self.auth.start()
        self.auth.configure_curve_callback(
            domain="*", credentials_provider=_OnlyThisKey(credentials.client_public)
        )
        self.socket: zmq.Socket[bytes] = self.context.socket(zmq.ROUTER)
        self.socket.curve_server = True
        self.socket.curve_publickey = credentials.server_public
        self.socket.curve_secretkey = credentials.server_secret
        self.socket.linger = 0
        # What a client does not take is dropped beyond this, and never waited for.
        self.socket.sndhwm = self.socket.rcvhwm = 2 * WINDOW
        self.socket.maxmsgsize = _REQUEST_BYTES
        self.socket.handshake_ivl = _HANDSHAKE_MS
        self.socket.ipv6 = "[" in bind
        try:
            self.socket.bind(bind)
        except zmq.ZMQError as error:
            self._end()
            raise DataError(f"shards cannot be served at {bind}: {error}") from error
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self._stop = os.eventfd(0)
        self._thread = threading.Thread(target=self._run, name="shard server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        self._end()
        os.close(self._stop)

    def _end(self) -> None:
        self.socket.close()
        self.auth.stop()
        self.context.term()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self.socket, zmq.POLLIN)
        poller.register(self._stop, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._stop in ready:
                return
            # Neither garbage nor a client that is gone ends the service to the others.
            with suppress(zmq.ZMQError, msgspec.MsgspecError, UnicodeError, ValueError):
                client, request = self.socket.recv_multipart(flags=zmq.NOBLOCK)
                ask = _decode_ask(request)
                data, why = self._read(ask)
                head = _encode(_PieceHead(ask.start, why, why == _COMING))
                self.socket.send_multipart([client, head, data], zmq.NOBLOCK, copy=False)

    def _read(self, ask: _ShardRequest) -> tuple[bytes, str]:
        info = self.shards.get(ask.key)
        if info is None:
            return b"", "it serves another data set"
        if not 0 <= ask.start < info.nbytes:
            return b"", f"there is no byte {ask.start}"
        path = self.store.find(info) if isinstance(self.store, Cache) else self.store / info.file
        if path is None:
            return b"", _COMING if self.coming(info) else "it does not have it"
        try:
            with open(path, "rb", buffering=0) as file:
                size = min(PIECE_BYTES, info.nbytes - ask.start)
                return os.pread(file.fileno(), size, ask.start), ""
        except FileNotFoundError:
            return b"", "it does not have it"
        except OSError as error:
            return b"", f"it cannot read it ({error.strerror})"


def fetch(
    address: str,
    info: ShardInfo,
    credentials: Credentials,
    *,
    first: int = 0,
    timeout_s: float = TIMEOUT_S,
    patience_s: float = PATIENCE_S,
) -> Generator[bytes]:
    """The shard's blocks from number `first` on, in order, unchecked.

    Raises FileNotFoundError when the peer does not have it (a peer that is fetching it is waited
    for), ConnectionError when it cannot be reached, is not of this run, goes away or answers
    nonsense, and TimeoutError after `timeout_s` without an answer."""
    context = zmq.Context()
    socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    try:
        socket.curve_serverkey = credentials.server_public
        socket.curve_publickey = credentials.client_public
        socket.curve_secretkey = credentials.client_secret
        socket.maxmsgsize = PIECE_BYTES + _REQUEST_BYTES
        socket.handshake_ivl = _HANDSHAKE_MS
        socket.ipv6 = "[" in address
        news = socket.get_monitor_socket(_GONE)
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            raise ConnectionError(f"{address} is no address ({error})") from error
        start = first * BLOCK_BYTES
        if start < info.nbytes:
            ready = _ask_until_it_is_there(socket, news, info, start, timeout_s, patience_s)
            yield from _blocks(socket, news, info, start, ready, timeout_s)
    finally:
        socket.disable_monitor()
        context.destroy(linger=0)


def _ask_until_it_is_there(
    socket: zmq.Socket[bytes],
    news: zmq.Socket[bytes],
    info: ShardInfo,
    start: int,
    timeout_s: float,
    patience_s: float,
) -> bytes:
    """The first piece."""
    give_up = time.monotonic() + patience_s
    while True:
        socket.send(_encode(_ShardRequest(key_of(info), start)))
        try:
            return _receive(socket, news, start, timeout_s)
        except _Coming as coming:
            if time.monotonic() > give_up:
                raise FileNotFoundError(str(coming)) from None
            time.sleep(ASK_AGAIN_S)


def _blocks(
    socket: zmq.Socket[bytes],
    news: zmq.Socket[bytes],
    info: ShardInfo,
    start: int,
    data: bytes,
    timeout_s: float,
) -> Generator[bytes]:
    """From `start` on, of which the first piece is here."""
    key, starts = key_of(info), range(start, info.nbytes, PIECE_BYTES)
    for piece in starts[1:WINDOW]:
        socket.send(_encode(_ShardRequest(key, piece)))
    block = bytearray()
    for i, piece in enumerate(starts):
        if i > 0:
            data = _receive(socket, news, piece, timeout_s)
        if len(data) != min(PIECE_BYTES, info.nbytes - piece):
            raise ConnectionError(f"it sent {len(data):,} bytes from byte {piece:,} on: too few")
        if i + WINDOW < len(starts):
            socket.send(_encode(_ShardRequest(key, starts[i + WINDOW])))
        block += data
        if len(block) == BLOCK_BYTES or piece == starts[-1]:
            yield bytes(block)
            block.clear()


def _receive(
    socket: zmq.Socket[bytes], news: zmq.Socket[bytes], piece: int, timeout_s: float
) -> bytes:
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    poller.register(news, zmq.POLLIN)
    ready = dict(poller.poll(int(timeout_s * 1000)))
    if not ready:
        raise TimeoutError(f"it sent nothing for {timeout_s:g} s")
    if socket not in ready:  # what arrived before it went is still taken
        raise ConnectionError(_what_happened(recv_monitor_message(news)["event"]))
    frames = socket.recv_multipart()
    try:
        head = _decode_head(frames[0])
    except msgspec.MsgspecError:
        raise ConnectionError("its answer makes no sense") from None
    if head.why:
        raise (_Coming if head.coming else FileNotFoundError)(head.why)
    if head.start != piece or len(frames) != 2:
        raise ConnectionError("it answered something else than was asked")
    return frames[1]


def _what_happened(event: int) -> str:
    if event == zmq.EVENT_CLOSED:
        return "nobody listens there"
    if event == zmq.EVENT_DISCONNECTED:
        return "it went away"
    return "it did not accept our key: it is not of this run"
