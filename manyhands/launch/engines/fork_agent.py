# SPDX-License-Identifier: Apache-2.0
"""The host agent: forks workers from a process that has imported torch and nothing else.

A fork takes 20 ms where a new interpreter needs two seconds to import torch. The agent must never
run a kernel, user code or a CUDA query itself: a child forked after that can hang. It holds the
run's memory (memfds it inherited), tells the driver when a worker ends and how, and dies with the
driver: when the socket to it closes, or its process ends, it kills its workers and goes. What a
worker had started ends with the worker, in whatever session it is.

Beside the workers of a run it may keep one more process, their companion, which works for all of
them: it outlives any of them, is forked again when it is killed, and ends with the last.

Run as `python -m manyhands.launch.engines.fork_agent SOCKET_FD ENTRY DRIVER`, where ENTRY names the
worker's main (`companion`, beside it, gives what the companion does) and DRIVER is the process that
started us.
"""

import ctypes
import faulthandler
import gc
import importlib
import os
import select
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from manyhands.launch.engines.kernels_that_die import spare_workers
from manyhands.launch.engines.work_mark import WorkMark
from manyhands.values.bounded_types import Name, ProcessOutput, Small, Words
from manyhands.values.hidden_secrets import discreet
from manyhands.values.machine import oom_kills
from manyhands.values.printable_messages import printable_decoder
from manyhands.values.work_in_hand import WorkInHand

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class StartWorker(msgspec.Struct, frozen=True, tag=True):
    worker: int
    orders: bytes
    log: str
    folder: str = ""
    """Its current directory; left out: the agent's."""

    __repr__ = discreet


class KillWorker(msgspec.Struct, frozen=True, tag=True):
    worker: int


class WorkerStarted(msgspec.Struct, frozen=True, tag=True):
    worker: Small
    pid: Small
    note: Words = ""
    """What a person should know about this host; said with its first worker."""


class WorkerExit(msgspec.Struct, frozen=True, tag=True):
    """`code` as in subprocess: negative is the signal that ended it."""

    worker: Small
    pid: Small
    code: int
    host: Name = ""
    lost: Words = ""
    """Its host is gone, as far as anybody can tell: why."""
    why: Words = ""
    """What is known of its end that the code does not say."""
    work: WorkInHand | None = None
    """What it was at."""
    log_tail: ProcessOutput = ""
    """After a crash, what it wrote last."""
    out_of_memory: bool = False
    """The kernel killed somebody on its host for want of memory, most likely it."""


class AgentUnable(msgspec.Struct, frozen=True, tag=True):
    """The agent could not even get ready."""

    text: str


ToAgent = StartWorker | KillWorker
FromAgent = WorkerStarted | WorkerExit | AgentUnable

encode = msgspec.msgpack.Encoder().encode
decode_to_agent = msgspec.msgpack.Decoder(ToAgent).decode
decode_from_agent = printable_decoder(msgspec.msgpack.Decoder(FromAgent).decode)

MAX_MESSAGE = 1 << 20

CRASHES = frozenset(
    (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGSYS)
)
"""Signals that a process brings upon itself."""
LOG_TAIL_BYTES = 1 << 14

UNREAPED_S = 3.0
"""How long a killed worker may take to end before it is looked at more closely."""

ORPHANS_S = 1.0
"""How long what a worker left behind is waited for."""

COMPANIONS = 4
"""So many are forked in a run, one after the other, before there is none any more."""

Companion = Callable[[bytes, int], Callable[[], object] | None]
"""What is to run beside a worker with these orders, if anything; so many more may follow it."""


def die_with_parent() -> None:
    """Linux: be killed when the thread that started this process ends. The agent has one thread, so
    that is right for its workers; a driver may have started its agent in a thread that ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans() -> None:
    """Linux: processes that descend from this one and lose their parent become our children, not
    init's. So what a worker detached is the worker's while that lives, and then the agent's."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


class Agent:
    def __init__(
        self,
        channel: socket.socket,
        driver: int,
        entry: Callable[[bytes, WorkMark], int],
        note: str = "",
        companion: "Companion | None" = None,
    ) -> None:
        """`driver`: its pidfd. `note`: what a person should know about this host."""
        self.note, self.companion = note, companion
        self.beside: int | None = None
        """The companion's process."""
        self.beside_as: StartWorker | None = None
        """The first worker's orders, which are the companion's too."""
        self.companions_left = 0
        self.channel, self.driver, self.entry, self.pid = channel, driver, entry, os.getpid()
        self.selector = selectors.DefaultSelector()
        self.selector.register(channel, selectors.EVENT_READ)
        self.selector.register(driver, selectors.EVENT_READ)
        self.pids: dict[int, int] = {}
        """worker → process; another run counts its workers anew"""
        self.workers: dict[int, int] = {}
        """process → worker; until its end is seen"""
        self.condemned: dict[int, float] = {}
        """process → when it was killed; until its end is seen, or it is written off"""
        self.written_off: set[int] = set()
        self.kept: dict[int, tuple[WorkMark, str]] = {}
        """process → what it is at, and its log"""
        self.oom_kills = oom_kills()

    def serve(self) -> None:
        """Until the driver hangs up, or is gone (a process that it forked may hold the line)."""
        try:
            while True:
                for key, _ in self.selector.select(1.0 if self.condemned else None):
                    if key.fileobj == self.driver:
                        return
                    if key.fileobj is not self.channel:
                        if key.data == self.beside:
                            self._replace_companion()
                        elif key.data in self.workers:
                            self._reap(key.data)
                        continue
                    data = self.channel.recv(MAX_MESSAGE)
                    if not data:
                        return
                    self._obey(decode_to_agent(data))
                self._write_off()
        finally:
            self._end_companion()
            for pid in self.workers:
                self._kill(pid)
            self.workers.clear()
            self._end_orphans()

    def _obey(self, order: ToAgent) -> None:
        match order:
            case StartWorker():
                if len(self.workers) == len(self.written_off):  # the first of a run
                    self._end_companion()
                    self.beside_as, self.companions_left = order, COMPANIONS
                    self._start_companion()
                mark = WorkMark()
                try:
                    pid = os.fork()
                except OSError as error:  # of processes or memory there are no more
                    mark.close()
                    why = f"it could not be started: {error.strerror}"
                    self._tell(WorkerExit(order.worker, 0, 1, why=why))
                    return
                if pid == 0:
                    self._become_worker(order, mark)
                self.kept[pid] = mark, order.log
                self.pids[order.worker], self.workers[pid] = pid, order.worker
                self.selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)
                self._tell(WorkerStarted(order.worker, pid, self.note))
                self.note = ""
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
        self._watch_no_more(pid)
        # What the worker itself had started. Until it is reaped nobody else has its number.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        worker = self.workers.pop(pid)
        if not self.workers:
            self._end_companion()
        self._end_orphans()
        self.condemned.pop(pid, None)
        if pid in self.written_off:  # its end was told before it came
            self.written_off.remove(pid)
            self.kept.pop(pid)[0].close()
        else:
            self._tell(self._obituary(worker, pid, os.waitstatus_to_exitcode(status)))

    def _obituary(self, worker: int, pid: int, code: int) -> WorkerExit:
        """With all that is known here of how it came."""
        mark, log = self.kept.pop(pid)
        work = mark.read()
        mark.close()
        if code != -signal.SIGKILL:
            tail = _tail(log) if -code in CRASHES else ""
            return WorkerExit(worker, pid, code, work=work, log_tail=tail)
        before, self.oom_kills = self.oom_kills, oom_kills()
        return WorkerExit(worker, pid, code, work=work, out_of_memory=self.oom_kills > before)

    def _end_orphans(self) -> None:
        """Whatever is our child and no worker was left behind by one that has ended. Those that do
        not end now (a disk that does not answer) are looked at again when the next worker ends."""
        deadline = time.monotonic() + ORPHANS_S
        kept = {*self.workers, self.beside}
        while orphans := [pid for pid in _children(self.pid) if pid not in kept]:
            for pid in orphans:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
                with suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            if time.monotonic() > deadline:
                return
            time.sleep(0.001)

    # ---- the companion

    def _start_companion(self) -> None:
        """If one is wanted; nobody depends on it, so it may fail."""
        assert self.beside_as is not None
        if self.companion is None or self.companions_left == 0:
            return
        life = self.companion(self.beside_as.orders, self.companions_left - 1)
        if life is None:
            return
        self.companions_left -= 1

        def live() -> int:
            life()
            return 0

        with suppress(OSError):  # of processes or memory there are no more
            pid = os.fork()
            if pid == 0:
                self._become(self.beside_as, live)
            self.beside = pid
            self.selector.register(os.pidfd_open(pid), selectors.EVENT_READ, pid)

    def _replace_companion(self) -> None:
        """It has ended. By itself: it has no more to do. Otherwise there is another."""
        if self._end_companion() != 0 and self.workers:
            self._start_companion()

    def _end_companion(self) -> int:
        """How it ended. It writes nothing any more on return: another may write where it did. (One
        that sits in the kernel is not waited for: it will not come back from there.)"""
        if self.beside is None:
            return 0
        self._watch_no_more(self.beside)
        self._kill(self.beside)
        deadline, status = time.monotonic() + ORPHANS_S, 0
        while time.monotonic() < deadline:
            ended, status = os.waitpid(self.beside, os.WNOHANG)
            if ended:
                break
            time.sleep(0.001)
        self.beside = None
        return os.waitstatus_to_exitcode(status)

    def _watch_no_more(self, pid: int) -> None:
        for key in list(self.selector.get_map().values()):
            if key.data == pid:
                self.selector.unregister(key.fileobj)
                os.close(key.fd)

    # ----

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

    def _become_worker(self, order: StartWorker, mark: WorkMark) -> None:
        """In the child; never returns."""
        self._become(order, lambda: self.entry(order.orders, mark))

    def _become(self, order: StartWorker, live: Callable[[], int]) -> None:
        """In a child; never returns."""
        code = 1
        try:
            die_with_parent()
            if os.getppid() != self.pid:  # it died before that was said
                os._exit(code)
            adopt_orphans()
            gc.enable()
            os.setpgid(0, 0)
            self.selector.close()
            self.channel.close()
            os.close(self.driver)
            nothing = os.open(os.devnull, os.O_RDWR)
            log = nothing
            with suppress(OSError):  # a worker need not have a log; what goes wrong it also tells
                log = os.open(order.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            for source, target in ((nothing, 0), (log, 1), (log, 2)):
                os.dup2(source, target)
            faulthandler.enable(file=2)  # the line of user code that crashed, in the log
            if order.folder:
                os.chdir(order.folder)
                sys.path.insert(0, order.folder)
            code = live()
        except BaseException:
            traceback.print_exc()
        finally:
            with suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)


def _tail(log: str) -> str:
    try:
        with open(log, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - LOG_TAIL_BYTES))
            return file.read(LOG_TAIL_BYTES).decode(errors="replace")
    except OSError:
        return ""


def _all_in_the_kernel(pid: int) -> bool:
    """Whether every thread is dead or in uninterruptible sleep."""
    try:
        stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    except OSError:
        return False  # one has just ended: look again
    return all(stat.rpartition(")")[2].split()[0] in "DZX" for stat in stats)


def _children(parent: int) -> list[int]:
    """Processes whose parent this is, ended ones that nobody has reaped among them."""
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            if int(path.read_text().rpartition(")")[2].split()[1]) == parent:
                found.append(int(path.parent.name))
    return found


@contextmanager
def gone_with(driver: int) -> Generator[None]:
    """Meanwhile this process ends with the driver, whatever it is doing. A thread sees to it, and
    is gone afterwards: only a process of one thread may fork."""
    over, end = os.pipe()

    def watch() -> None:
        ready, _, _ = select.select([driver, over], [], [])
        if driver in ready:
            os._exit(1)

    thread = threading.Thread(target=watch, name="driver watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.close(end)
        thread.join()
        os.close(over)


def main() -> None:
    number, named, parent = sys.argv[1:4]
    del sys.argv[1:]  # they are not for user code that parses its own
    try:
        driver = os.pidfd_open(int(parent))
    except ProcessLookupError:
        return
    if os.getppid() != int(parent):  # it died before, and another has its number
        return
    adopt_orphans()
    gc.disable()  # importing torch makes a million objects; looking for garbage costs 0.4 s
    channel = socket.socket(fileno=int(number))
    module, _, function = named.partition(":")
    try:
        with gone_with(driver):
            importlib.import_module("torch")  # the point of this process

            found = importlib.import_module(module)
            entry = getattr(found, function)
            companion = getattr(found, "companion", None)
    except Exception as error:
        channel.send(encode(AgentUnable(f"{type(error).__name__}: {error}")))
        return
    note = spare_workers()
    gc.freeze()  # workers need not look at (and so copy) what they all have in common
    Agent(channel, driver, entry, note, companion).serve()


if __name__ == "__main__":
    main()
