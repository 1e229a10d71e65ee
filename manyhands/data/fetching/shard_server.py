# SPDX-License-Identifier: Apache-2.0
"""Serves shards to other hosts: what manifests list, from a prepared folder or a cache.

A server that is just fetching what it is asked for says so, and is asked again.
"""

import os
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import msgspec
import zmq

from manyhands.data.fetching.shard_cache import Cache, key_of
from manyhands.data.fetching.shard_protocol import (
    PIECE_BYTES,
    REQUEST_BYTES,
    WINDOW,
    PieceHead,
    ShardRequest,
    decode_request,
    encode,
)
from manyhands.data.shards.manifest import ShardInfo
from manyhands.values.credentials import Credentials
from manyhands.values.errors import DataError
from manyhands.values.guarded_router import GuardedRouter

_COMING = "it is still fetching it"


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
        self.router = GuardedRouter(
            credentials.server_public,
            credentials.server_secret,
            credentials.client_public,
            most_bytes=REQUEST_BYTES,
        )
        self.socket = self.router.socket
        # What a client does not take is dropped beyond this, and never waited for.
        self.socket.sndhwm = self.socket.rcvhwm = 2 * WINDOW
        self.socket.ipv6 = "[" in bind
        try:
            self.socket.bind(bind)
        except zmq.ZMQError as error:
            self.router.close()
            raise DataError(f"shards cannot be served at {bind}: {error}") from error
        self.address = self.socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self._stop = os.eventfd(0)
        self._thread = threading.Thread(target=self._run, name="shard server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        self.router.close()
        os.close(self._stop)

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
                if (received := self.router.receive()) is None:
                    continue
                client, request = received
                ask = decode_request(request)
                data, why = self._read(ask)
                head = encode(PieceHead(ask.start, why, why == _COMING))
                self.socket.send_multipart([client, head, data], zmq.NOBLOCK, copy=False)

    def _read(self, ask: ShardRequest) -> tuple[bytes, str]:
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
