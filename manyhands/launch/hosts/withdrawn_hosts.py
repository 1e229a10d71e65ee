# SPDX-License-Identifier: Apache-2.0
"""Hosts that a run does not want any more: kept in its folder, so that a resume knows them too.

A host with a token of its own is known by that token, whatever it calls itself: its connections are
refused. One that came with the token that all have can be known by its name only.
"""

import time
from pathlib import Path

import msgspec

from manyhands.values.errors import RunDirError
from manyhands.values.run_folder import RunDir, write_whole


class WithdrawnHost(msgspec.Struct, frozen=True):
    name: str
    token: str = ""
    """The public key of its own token; left out: it had the one that all have."""
    time: float = 0.0


class WithdrawnHosts:
    """May be asked by any thread; only the driver's main thread adds."""

    def __init__(self, run: RunDir | None = None) -> None:
        self._run = run
        self._hosts: tuple[WithdrawnHost, ...] = () if run is None else read_withdrawn(run)

    def add(self, name: str, token: bytes | None) -> None:
        key = "" if token is None else token.decode()
        self._hosts += (WithdrawnHost(name, key, time.time()),)
        if self._run is not None:
            encoded = msgspec.json.format(msgspec.json.encode(self._hosts))
            write_whole(self._run.withdrawn, encoded)

    def has_token(self, public: bytes) -> bool:
        return any(host.token == public.decode() for host in self._hosts)

    def has_name(self, name: str) -> bool:
        return any(host.name == name for host in self._hosts)


def read_withdrawn(run: RunDir) -> tuple[WithdrawnHost, ...]:
    path: Path = run.withdrawn
    try:
        return msgspec.json.decode(path.read_bytes(), type=tuple[WithdrawnHost, ...])
    except FileNotFoundError:
        return ()
    except (OSError, msgspec.MsgspecError) as error:
        raise RunDirError(
            f"{path} cannot be read ({error}): hosts in it would be let in again. Mend it, or "
            "remove it if that is meant."
        ) from error
