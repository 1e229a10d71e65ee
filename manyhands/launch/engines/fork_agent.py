# SPDX-License-Identifier: Apache-2.0
"""The host agent: forks workers from a process that has imported torch and nothing else.

A fork takes 20 ms where a new interpreter needs two seconds to import torch. The agent must never
run a kernel, user code or a CUDA query itself: a child forked after that can hang. It holds the
run's memory (memfds it inherited), tells the driver when a worker ends and how, and dies with the
driver: when the socket to it closes, it kills its workers and goes.

Run as `python -m manyhands.launch.engines.fork_agent SOCKET_FD ENTRY`, where ENTRY names the
worker's main.
"""

import ctypes
import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

_PR_SET_PDEATHSIG = 1


class StartWorker(msgspec.Struct, frozen=True, tag=True):
    worker: int
    orders: bytes
    log: str
    folder: str = ""
    """Its current directory; left out: the agent's."""


class KillWorker(msgspec.Struct, frozen=True, tag=True):
    worker: int


class WorkerStarted(msgspec.Struct, frozen=True, tag=True):
    worker: int
    pid: int


class WorkerExit(msgspec.Struct, frozen=True, tag=True):
    """`code` as in subprocess: negative is the signal that ended it."""

    worker: int
    pid: int
    code: int
    host: str = ""
    lost: str = ""
    """Its host is gone, as far as anybody can tell: why."""


class AgentUnable(msgspec.Struct, frozen=True, tag=True):
    """The agent could not even get ready."""

    text: str


ToAgent = StartWorker | KillWorker
FromAgent = WorkerStarted | WorkerExit | AgentUnable

encode = msgspec.msgpack.Encoder().encode
decode_to_agent = msgspec.msgpack.Decoder(ToAgent).decode
decode_from_agent = msgspec.msgpack.Decoder(FromAgent).decode

MAX_MESSAGE = 1 << 20

UNREAPED_S = 3.0
"""How long a killed worker may take to end before it is looked at more closely."""


def die_with_parent() -> None:
    """Linux: be killed when the thread that started this process ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Agent:
    def __init__(self, channel: socket.socket, entry: Callable[[bytes], int]) -> None:
        self.channel, self.entry, self.pid = channel, entry, os.getpid()
        self.selector = selectors.DefaultSelector()
        self.selector.register(channel, selectors.EVENT_READ)
        self.pids: dict[int, int] = {}
        """worker → process; another run counts its workers anew"""
        self.workers: dict[int, int] = {}
        """process → worker; until its end is seen"""
        self.condemned: dict[int, float] = {}
        """process → when it was killed; until its end is seen, or it is written off"""
        self.written_off: set[int] = set()

    def serve(self) -> None:
        """Until the driver hangs up."""
        try:
            while True:
                for key, _ in self.selector.select(1.0 if self.condemned else None):
                    if key.fileobj is not self.channel:
                        self._reap(key.data)
                        continue
                    data = self.channel.recv(MAX_MESSAGE)
                    if not data:
                        return
                    self._obey(decode_to_agent(data))
                self._write_off()
        finally:
            for pid in self.workers:
                self._kill(pid)

    def _obey(self, order: ToAgent) -> None:
        match order:
            case StartWorker():
                pid = os.fork()
                if pid == 0:
                    self._become_worker(order)
                self.pids[order.worker], self.workers[pid] = pid, order.worker
                self.selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
                self._tell(WorkerStarted(order.worker, pid))
            case KillWorker():
                pid = self.pids.get(order.worker)
                if pid in self.workers:
                    self.condemned.setdefault(pid, time.monotonic())
                    self._kill(pid)

    def _kill(self, pid: int) -> None:
        """The worker and whatever it started."""
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)

    def _reap(self, pid: int) -> None:
        for key in list(self.selector.get_map().values()):
            if key.data == pid:
                self.selector.unregister(key.fileobj)
                os.close(key.fd)
        _, status = os.waitpid(pid, 0)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)  # processes that the worker itself had started
        worker = self.workers.pop(pid)
        self.condemned.pop(pid, None)
        if pid in self.written_off:  # its end was told before it came
            self.written_off.remove(pid)
        else:
            self._tell(WorkerExit(worker, pid, os.waitstatus_to_exitcode(status)))

    def _write_off(self) -> None:
        """Report those as ended who were killed and whose threads all sit in the kernel.

        A thread in uninterruptible sleep (a disk that does not answer) dies when that ends, and not
        before. It will not run another instruction of its own: a pending SIGKILL is obeyed before
        the return from the kernel. So nothing can be stored by it any more, and nobody need wait.
        """
        now = time.monotonic()
        for pid, since in list(self.condemned.items()):
            if now - since > UNREAPED_S and _all_in_the_kernel(pid):
                del self.condemned[pid]
                self.written_off.add(pid)
                self._tell(WorkerExit(self.workers[pid], pid, -signal.SIGKILL))

    def _tell(self, message: FromAgent) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):
            self.channel.send(encode(message))

    def _become_worker(self, order: StartWorker) -> None:
        """In the child; never returns."""
        code = 1
        try:
            die_with_parent()
            if os.getppid() != self.pid:  # it died before that was said
                os._exit(code)
            gc.enable()
            os.setpgid(0, 0)
            self.selector.close()
            self.channel.close()
            log = os.open(order.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            nothing = os.open(os.devnull, os.O_RDONLY)
            for source, target in ((nothing, 0), (log, 1), (log, 2)):
                os.dup2(source, target)
            if order.folder:
                os.chdir(order.folder)
                sys.path.insert(0, order.folder)
            code = self.entry(order.orders)
        except BaseException:
            traceback.print_exc()
        finally:
            with suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)


def _all_in_the_kernel(pid: int) -> bool:
    """Whether every thread is dead or in uninterruptible sleep."""
    try:
        stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    except OSError:
        return False  # one has just ended: look again
    return all(stat.rpartition(")")[2].split()[0] in "DZX" for stat in stats)


def main() -> None:
    die_with_parent()
    if os.getppid() == 1:
        return
    gc.disable()  # importing torch makes a million objects; looking for garbage costs 0.4 s
    channel = socket.socket(fileno=int(sys.argv[1]))
    module, _, function = sys.argv[2].partition(":")
    try:
        importlib.import_module("torch")  # the point of this process

        entry = getattr(importlib.import_module(module), function)
    except Exception as error:
        channel.send(encode(AgentUnable(f"{type(error).__name__}: {error}")))
        return
    gc.freeze()  # workers need not look at (and so copy) what they all have in common
    Agent(channel, entry).serve()


if __name__ == "__main__":
    main()
