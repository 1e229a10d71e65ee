# SPDX-License-Identifier: Apache-2.0
"""How people reach a run that is going on: a socket in its folder, for its owner only.

`manyhands scale`, `set`, `pause`, `continue`, `stop`, `audit` and `hosts --drop` connect, say one
thing, and get one answer when it has been done. The socket is a file of the run folder with mode
0600, so whoever may write to the folder's owner's files may speak, and nobody else.
"""

import os
import selectors
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from manyhands.values.bounded_types import NotUnderstood
from manyhands.values.errors import RequestError
from manyhands.values.view import Settings

MOST_BYTES = 1 << 16
MOST_CALLERS = 32
"""At a time; when there are more, the oldest is hung up on."""


class Scale(msgspec.Struct, frozen=True, tag=True):
    workers: int | None = None
    servers: int | None = None
    """None: as many as now."""


class Change(msgspec.Struct, frozen=True, tag=True):
    settings: Settings


class Pause(msgspec.Struct, frozen=True, tag=True):
    pass


class Continue(msgspec.Struct, frozen=True, tag=True):
    pass


class StopRun(msgspec.Struct, frozen=True, tag=True):
    pass


class Examine(msgspec.Struct, frozen=True, tag=True):
    """An audit of the next step."""


class Dismiss(msgspec.Struct, frozen=True, tag=True):
    """A host is to go, and not to come back."""

    host: str


Ask = Scale | Change | Pause | Continue | StopRun | Examine | Dismiss


class NobodyThere(RequestError):
    """No driver answers."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Ask).decode


class CommandSocket:
    """The driver's end. Its `fileno` is readable when somebody speaks."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.selector = selectors.DefaultSelector()
        self.callers: list[socket.socket] = []
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        path.unlink(missing_ok=True)
        before = os.umask(0o177)
        try:
            self._at(self.listener.bind)
        finally:
            os.umask(before)
        self.listener.listen()
        self.selector.register(self.listener, selectors.EVENT_READ)

    def _at(self, verb: Callable[[str], None]) -> None:
        _by_short_name(self.path, verb)

    def fileno(self) -> int:
        return self.selector.fileno()  # type: ignore[attr-defined]  # epoll's

    def receive(self) -> list[tuple[Ask, Callable[[str], None]]]:
        """What was asked, with the way to answer; never blocks. Garbage is hung up on."""
        found: list[tuple[Ask, Callable[[str], None]]] = []
        for key, _ in self.selector.select(0):
            if key.fileobj is self.listener:
                with suppress(OSError):
                    caller, _ = self.listener.accept()
                    caller.setblocking(False)
                    self.selector.register(caller, selectors.EVENT_READ)
                    self.callers.append(caller)
                if len(self.callers) > MOST_CALLERS:
                    self._hang_up(self.callers[0])
                continue
            caller = key.fileobj
            assert isinstance(caller, socket.socket)
            try:
                found.append((_decode(caller.recv(MOST_BYTES)), self._answer_to(caller)))
            except (OSError, *NotUnderstood):
                self._hang_up(caller)
        return found

    def _answer_to(self, caller: socket.socket) -> Callable[[str], None]:
        def answer(text: str) -> None:
            with suppress(OSError):
                caller.send(text.encode()[:MOST_BYTES])
            self._hang_up(caller)

        return answer

    def _hang_up(self, caller: socket.socket) -> None:
        with suppress(KeyError, ValueError):
            self.selector.unregister(caller)
        with suppress(ValueError):
            self.callers.remove(caller)
        caller.close()

    def close(self) -> None:
        for key in list(self.selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self.selector.close()
        self.path.unlink(missing_ok=True)


def ask(path: Path, what: Ask, *, patience_s: float = 60.0) -> str:
    """Say one thing to the run whose socket this is, and wait for the answer."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        line.settimeout(patience_s)
        try:
            _by_short_name(path, line.connect)
            line.send(_encode(what))
            answer = line.recv(MOST_BYTES).decode()
        except (FileNotFoundError, ConnectionRefusedError):
            raise NobodyThere(f"nobody is training in {path.parent} now.") from None
        except TimeoutError:
            raise RequestError(
                f"the run in {path.parent} has not done it within {patience_s:.0f} s; it may still."
            ) from None
        except OSError as error:
            raise RequestError(f"cannot speak to the run in {path.parent}: {error}") from error
    if not answer:
        raise RequestError(f"the run in {path.parent} ended before it could answer.")
    if answer.startswith("error: "):
        raise RequestError(answer.removeprefix("error: "))
    return answer


def _by_short_name(path: Path, verb: Callable[[str], None]) -> None:
    """A socket's name may have 108 bytes and no more; a folder's number makes it short."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        verb(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)


def wait_until_gone(path: Path, *, patience_s: float) -> bool:
    """Whether the run that owned this socket has ended by then."""
    deadline = time.monotonic() + patience_s
    while path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return not path.exists()
