# SPDX-License-Identifier: Apache-2.0
"""Workers as processes of this host, forked by an agent that is this process's child."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from manyhands.launch.engines.fork_agent import (
    MAX_MESSAGE,
    AgentUnable,
    KillWorker,
    StartWorker,
    WorkerExit,
    WorkerStarted,
    decode_from_agent,
    encode,
)
from manyhands.launch.engines.launcher import (
    LauncherEvent,
    LauncherTraits,
    ThisHost,
    WorkerPlace,
)
from manyhands.launch.engines.memory_segments import blank
from manyhands.values.environment import agent_environment
from manyhands.values.errors import RequestError
from manyhands.values.machine import allow_open_files, oom_kills

AGENT = "manyhands.launch.engines.fork_agent"

LAST_WORDS = 4096
"""So many bytes of what the agent wrote to stderr are looked at when it has ended."""


class Local:
    """Processes of this host, forked by an agent that is this process's child.

    Constructing it only starts the agent, which then imports torch while the caller does other
    things; so construct it early.
    """

    def __init__(self, entry: str, fds: tuple[int, int]) -> None:
        allow_open_files()
        self.entry, self.fds = entry, fds
        self.traits = LauncherTraits()
        self.hosts = ThisHost()
        self.folder = ""
        """The current directory of workers; "": this process's."""
        self.errors = os.memfd_create("manyhands-agent-errors")
        """What the agent says on stderr: of interest when it ends."""
        self.channel, self.agent = self._start_agent()
        self.alive: dict[int, int] = {}
        self.used = False
        """Whether it was asked for a worker."""
        self.works = False
        """Whether an agent has ever started one."""

    def _start_agent(self) -> tuple[socket.socket, "subprocess.Popen[bytes]"]:
        self.oom_kills = oom_kills()
        os.ftruncate(self.errors, 0)
        os.lseek(self.errors, 0, os.SEEK_SET)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            agent = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    AGENT,
                    str(theirs.fileno()),
                    self.entry,
                    str(os.getpid()),
                ],
                pass_fds=(theirs.fileno(), *self.fds),
                stdin=subprocess.DEVNULL,
                stderr=self.errors,
                start_new_session=True,  # Ctrl-C is for the driver, which then asks workers to stop
                env=agent_environment(),
            )
        return ours, agent

    def start(self, worker: int, orders: Callable[[WorkerPlace], bytes], log: Path) -> WorkerPlace:
        place = WorkerPlace(at="", fds=self.fds)
        self.fork(worker, orders(place), log)
        return place

    def fork(self, worker: int, orders: bytes, log: Path) -> None:
        self.alive[worker], self.used = 0, True
        message = StartWorker(worker, orders, str(log.absolute()), self.folder)
        with suppress(BrokenPipeError, ConnectionResetError):  # poll will tell
            self.channel.send(encode(message))

    def poll(self) -> list[LauncherEvent]:
        signs: list[LauncherEvent] = []
        with suppress(BlockingIOError):
            while True:
                try:
                    data = self.channel.recv(MAX_MESSAGE, socket.MSG_DONTWAIT)
                except ConnectionResetError:  # it ended before it had read everything
                    continue  # what it said is still to be read
                if not data:
                    return signs + self._agent_gone()
                sign = decode_from_agent(data)
                if isinstance(sign, AgentUnable):
                    raise RequestError(f"workers cannot be started: {sign.text}")
                if isinstance(sign, WorkerStarted):
                    self.alive[sign.worker], self.works = sign.pid, True
                else:
                    self.alive.pop(sign.worker, None)
                signs.append(sign)
        return signs

    def _agent_gone(self) -> list[LauncherEvent]:
        """Its workers have died with it; the memory has not. Another agent takes its place, unless
        it could not even begin: then the next one cannot either, and what it said is told."""
        code = self.agent.wait()
        said = self._last_words()
        if self.used and not self.works and code >= 0:
            raise RequestError(f"workers cannot be started: {said or f'exit code {code}'}")
        how = f"was killed by {_named(-code)}" if code < 0 else f"ended with exit code {code}"
        why = f"the process that had forked it ({self.agent.pid}) {how}"
        gone: list[LauncherEvent] = [
            WorkerExit(
                worker,
                pid,
                -9,
                why=f"{why}: {said}" if said else why,
                out_of_memory=code == -9 and oom_kills() > self.oom_kills,
            )
            for worker, pid in self.alive.items()
        ]
        for pid in self.alive.values():
            _see_dead(pid)
        self.alive.clear()
        if self.used:
            channel, self.agent = self._start_agent()
            os.dup2(channel.fileno(), self.channel.fileno())  # whoever polls it knows the number
            channel.close()
        return gone

    def _last_words(self) -> str:
        """The end of what the agent wrote to stderr; the most important line comes last there."""
        size = os.lseek(self.errors, 0, os.SEEK_END)
        said = os.pread(self.errors, LAST_WORDS, max(0, size - LAST_WORDS)).decode(errors="replace")
        lines = [line.strip() for line in said.strip().splitlines()]
        return "\n".join(lines[-1:] + [f"    {line}" for line in lines[-6:-1]])

    def fileno(self) -> int:
        return self.channel.fileno()

    def kill(self, worker: int) -> None:
        with suppress(OSError):
            self.channel.send(encode(KillWorker(worker)))

    def stop(self) -> None:
        for worker in list(self.alive):
            self.kill(worker)
        deadline = time.monotonic() + 5
        while self.alive and time.monotonic() < deadline and self.agent.poll() is None:
            with suppress(RequestError):  # it cannot start any; that was told when it was asked to
                self.poll()
            time.sleep(0.002)
        blank(self.fds)

    def close(self) -> None:
        if self.channel.fileno() < 0:
            return
        self.stop()
        self.channel.close()  # the agent goes when we hang up
        if not self.used:  # it may still be busy importing torch
            self.agent.kill()
        try:
            self.agent.wait(5)
        except subprocess.TimeoutExpired:
            self.agent.kill()
            self.agent.wait()
        for fd in (*self.fds, self.errors):
            os.close(fd)


def _named(number: int) -> str:
    return f"signal {number} ({signal.Signals(number).name})"


def _see_dead(pid: int) -> None:
    """Wait until a process that was killed runs no more. Who reaps it is whoever adopted it: as
    process 1 of a container, we."""
    deadline = time.monotonic() + 5
    while pid and time.monotonic() < deadline:
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return
        if state in "ZX":
            return
        time.sleep(0.002)
