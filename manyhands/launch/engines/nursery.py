# SPDX-License-Identifier: Apache-2.0
"""A process that does nothing but fork others: for a worker, which cannot any more.

A child has only the thread that forked it. Whatever locks the other threads held (of the allocator,
of OpenMP, of a socket's context) stay locked in it for ever, so it hangs sooner or later; and a
worker has threads from its first minute on. So it forks its nursery before it has any. That one
runs no kernel and no user code, and forks children as they are asked for.

Nobody is left behind: the nursery is killed when its worker ends, however that came, and so are its
children when it does; what those had started is adopted on the way up and ended by the host agent.
"""

import gc
import os
import selectors
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress

import msgspec

from manyhands.launch.engines.fork_agent import adopt_orphans, die_with_parent


class ForkChild(msgspec.Struct, frozen=True, tag=True):
    """Comes with the files that the child is given."""

    number: int


class EndChild(msgspec.Struct, frozen=True, tag=True):
    number: int


class ChildEnded(msgspec.Struct, frozen=True, tag=True):
    number: int
    code: int
    """As in subprocess: negative is the signal that ended it."""


_encode = msgspec.msgpack.Encoder().encode
_decode_order = msgspec.msgpack.Decoder(ForkChild | EndChild).decode
_decode_event = msgspec.msgpack.Decoder(ChildEnded).decode

MOST_BYTES, MOST_FDS = 4096, 4

ChildLife = Callable[[list[int]], object]
"""What a child does, with the files it was given."""


class Nursery:
    """The worker's end. Once it is gone it stays so: `alive` is False, and nothing is forked."""

    def __init__(self, live: ChildLife) -> None:
        """Forks. To be called by a process of one thread, which then is the nursery's parent."""
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            self.channel.close()
            _become_nursery(theirs, live, parent)
        theirs.close()
        self.alive = True

    def fork(self, number: int, files: list[int]) -> None:
        self._send(ForkChild(number), files)

    def end(self, number: int) -> None:
        self._send(EndChild(number), [])

    def ended(self) -> list[ChildEnded]:
        """Those of whose end was heard; never blocks."""
        found: list[ChildEnded] = []
        while self.alive:
            try:
                data = self.channel.recv(MOST_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except ConnectionError:
                data = b""
            if not data:
                self.alive = False
                break
            found.append(_decode_event(data))
        return found

    def _send(self, order: ForkChild | EndChild, files: list[int]) -> None:
        try:
            socket.send_fds(self.channel, [_encode(order)], files)
        except OSError:
            self.alive = False

    def close(self) -> None:
        """It ends, and its children with it."""
        self.alive = False
        self.channel.close()
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def _become_nursery(channel: socket.socket, live: ChildLife, parent: int) -> None:
    """In the child; never returns."""
    try:
        die_with_parent()
        if os.getppid() == parent:  # else it died before that was said
            adopt_orphans()
            _leave_signals_to_the_worker()
            gc.disable()
            gc.freeze()
            _serve(channel, live)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _leave_signals_to_the_worker() -> None:
    """Who is asked to stop is the worker; it ends us. (Not ignored: that would be inherited by what
    user code starts.)"""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, frame: None)


def _serve(channel: socket.socket, live: ChildLife) -> None:
    """Until the worker hangs up."""
    selector, mine = selectors.DefaultSelector(), os.getpid()
    selector.register(channel, selectors.EVENT_READ)
    pids: dict[int, int] = {}
    while True:
        for key, _ in selector.select():
            if key.fileobj is not channel:
                number = key.data
                selector.unregister(key.fd)
                os.close(key.fd)
                _, status = os.waitpid(pids.pop(number), 0)
                with suppress(OSError):
                    channel.send(_encode(ChildEnded(number, os.waitstatus_to_exitcode(status))))
                continue
            data, files, _, _ = socket.recv_fds(channel, MOST_BYTES, MOST_FDS)
            if not data:
                return
            order = _decode_order(data)
            if isinstance(order, EndChild):
                if order.number in pids:
                    os.kill(pids[order.number], signal.SIGKILL)
                continue
            try:
                pid = os.fork()
            except OSError:  # of processes or memory there are no more
                channel.send(_encode(ChildEnded(order.number, 1)))
            else:
                if pid == 0:
                    channel.close()
                    selector.close()
                    _become_child(live, files, mine)
                pids[order.number] = pid
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, order.number)
            for fd in files:
                os.close(fd)


def _become_child(live: ChildLife, files: list[int], nursery: int) -> None:
    """In the child; never returns."""
    try:
        die_with_parent()
        if os.getppid() == nursery:
            gc.enable()
            live(files)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(0)
