# SPDX-License-Identifier: Apache-2.0
"""Fetches a shard from another host, block by block.

What arrives is not checked here: the caller compares every block with the manifest.
"""

import time
from collections.abc import Generator
from contextlib import contextmanager

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from manyhands.data.fetching.shard_cache import key_of
from manyhands.data.fetching.shard_protocol import (
    HANDSHAKE_MS,
    PIECE_BYTES,
    REQUEST_BYTES,
    WINDOW,
    ShardRequest,
    decode_head,
    encode,
)
from manyhands.data.shards.manifest import BLOCK_BYTES, ShardInfo
from manyhands.values.credentials import Credentials

TIMEOUT_S = 5.0
"""A peer that sends nothing for so long is given up on."""
PATIENCE_S = 60.0
"""... and one that is still fetching the shard itself after so long."""
ASK_AGAIN_S = 0.05

_GONE = (
    zmq.EVENT_CLOSED  # nobody listens there
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)


class _Coming(FileNotFoundError):
    """The peer does not have it yet."""


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
    with _connected(address, info, credentials, timeout_s) as peer:
        start = first * BLOCK_BYTES
        if start < info.nbytes:
            ready = _ask_until_it_is_there(peer, start, patience_s)
            yield from _blocks(peer, info.nbytes, start, ready)


def _ask_until_it_is_there(peer: "_PeerConnection", start: int, patience_s: float) -> bytes:
    """The first piece."""
    give_up = time.monotonic() + patience_s
    while True:
        peer.ask(start)
        try:
            return peer.receive(start)
        except _Coming as coming:
            if time.monotonic() > give_up:
                raise FileNotFoundError(str(coming)) from None
            time.sleep(ASK_AGAIN_S)


def _blocks(peer: "_PeerConnection", nbytes: int, start: int, data: bytes) -> Generator[bytes]:
    """From `start` on, of which the first piece is here."""
    starts = range(start, nbytes, PIECE_BYTES)
    for piece in starts[1:WINDOW]:
        peer.ask(piece)
    block = bytearray()
    for i, piece in enumerate(starts):
        if i > 0:
            data = peer.receive(piece)
        if len(data) != min(PIECE_BYTES, nbytes - piece):
            raise ConnectionError(f"it sent {len(data):,} bytes from byte {piece:,} on: too few")
        if i + WINDOW < len(starts):
            peer.ask(starts[i + WINDOW])
        block += data
        if len(block) == BLOCK_BYTES or piece == starts[-1]:
            yield bytes(block)
            block.clear()


@contextmanager
def _connected(
    address: str, info: ShardInfo, credentials: Credentials, timeout_s: float
) -> Generator["_PeerConnection"]:
    context = zmq.Context()
    socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    try:
        socket.curve_serverkey = credentials.server_public
        socket.curve_publickey = credentials.client_public
        socket.curve_secretkey = credentials.client_secret
        socket.maxmsgsize = PIECE_BYTES + REQUEST_BYTES
        socket.handshake_ivl = HANDSHAKE_MS
        socket.ipv6 = "[" in address
        news = socket.get_monitor_socket(_GONE)
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            raise ConnectionError(f"{address} is no address ({error})") from error
        yield _PeerConnection(socket, news, key_of(info), timeout_s)
    finally:
        socket.disable_monitor()
        context.destroy(linger=0)


class _PeerConnection:
    """Asks for pieces of one shard; `news` tells what happens to the connection."""

    def __init__(
        self, socket: zmq.Socket[bytes], news: zmq.Socket[bytes], key: str, timeout_s: float
    ) -> None:
        self.socket, self.news, self.key, self.timeout_s = socket, news, key, timeout_s
        self.poller = zmq.Poller()
        self.poller.register(socket, zmq.POLLIN)
        self.poller.register(news, zmq.POLLIN)

    def ask(self, start: int) -> None:
        self.socket.send(encode(ShardRequest(self.key, start)))

    def receive(self, start: int) -> bytes:
        ready = dict(self.poller.poll(int(self.timeout_s * 1000)))
        if not ready:
            raise TimeoutError(f"it sent nothing for {self.timeout_s:g} s")
        if self.socket not in ready:  # what arrived before it went is still taken
            raise ConnectionError(_what_happened(recv_monitor_message(self.news)["event"]))
        frames = self.socket.recv_multipart()
        try:
            head = decode_head(frames[0])
        except msgspec.MsgspecError:
            raise ConnectionError("its answer makes no sense") from None
        if head.why:
            raise (_Coming if head.coming else FileNotFoundError)(head.why)
        if head.start != start or len(frames) != 2:
            raise ConnectionError("it answered something else than was asked")
        return frames[1]


def _what_happened(event: int) -> str:
    if event == zmq.EVENT_CLOSED:
        return "nobody listens there"
    if event == zmq.EVENT_DISCONNECTED:
        return "it went away"
    return "it did not accept our key: it is not of this run"
