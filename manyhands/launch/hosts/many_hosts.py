# SPDX-License-Identifier: Apache-2.0
"""Workers on several hosts: this one, if it has hands to give, and all that join."""

import os
import selectors
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import msgspec

from manyhands.launch.engines.fork_agent import KillWorker, StartWorker, WorkerExit, WorkerStarted
from manyhands.launch.engines.launcher import (
    HostNews,
    LauncherEvent,
    LauncherTraits,
    LauncherWarning,
    WorkerPlace,
)
from manyhands.launch.engines.local_processes import Local
from manyhands.launch.engines.memory_segments import blank
from manyhands.launch.hosts.carried_logs import CarriedLogs
from manyhands.launch.hosts.join_protocol import Logged, ProbeAnswer
from manyhands.launch.hosts.join_server import HostCame, HostGone, HostReady, HostSaid
from manyhands.launch.hosts.joined_hosts import JoinedHosts, Listening
from manyhands.values.errors import RequestError


class ManyHosts:
    """A Launcher of workers on all hosts that are here."""

    def __init__(self, entry: str, fds: tuple[int, int], listening: Listening) -> None:
        self.fds = fds
        self.traits = LauncherTraits(listens=listening.addresses[0], many_hosts=True)
        with ExitStack() as undo:
            for fd in fds:
                undo.callback(os.close, fd)
            self.hosts = JoinedHosts(listening, fds[0])
            undo.callback(self.hosts.close)
            self.here = Local(entry, fds) if self.hosts.here_slots else None
            undo.pop_all()
        self.at: dict[int, str] = {}
        """worker → host; "" is this one."""
        self.doomed: set[int] = set()
        """Killed, and not seen dead yet: their slots can be given away."""
        self.logs = CarriedLogs()
        self.unborn: list[WorkerExit] = []
        """Workers that could not even be started."""
        self.closed = False
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.hosts.server.event, selectors.EVENT_READ)
        if self.here is not None:
            self.selector.register(self.here.fileno(), selectors.EVENT_READ)

    def wait_for(self, count: int, patience_s: float, alive: Callable[[], None]) -> None:
        """Until so many hosts have joined. `alive` raises when one of them never will."""
        deadline = time.monotonic() + patience_s
        others, listening = self.hosts.others, self.hosts.listening
        while len(others) < count:
            self.poll()
            alive()
            if time.monotonic() > deadline:
                names = ", ".join(h.guest.here.name for h in others.values()) or "none"
                where = f"{listening.shown}:{self.hosts.server.port}"
                look = f"Look at the others: can they reach this host at {where}?"
                raise RequestError(
                    f"{len(others)} of {count} hosts have joined within {patience_s:.0f} s "
                    f"({names}). {self.hosts.refusals() or look}"
                )
            self.selector.select(0.1)

    def start(self, worker: int, orders: Callable[[WorkerPlace], bytes], log: Path) -> WorkerPlace:
        taken = Counter(at for w, at in self.at.items() if w not in self.doomed)
        place = self.hosts.place(taken, self.fds)
        self.at[worker], mine = place.at, orders(place)
        if place.at == "" and self.here is not None:
            self.here.fork(worker, mine, log)
        elif place.at not in self.hosts.others:
            self.unborn.append(WorkerExit(worker, 0, -9, lost="no host had room for it"))
        else:
            self.hosts.others[place.at].workers[worker] = 0
            self.logs.begin(worker, log.absolute())
            start = StartWorker(worker, mine, str(log.absolute()))
            self.hosts.server.send(place.at, start)
        return place

    def poll(self) -> list[LauncherEvent]:
        found: list[LauncherEvent] = [] if self.here is None else self.here.poll()
        found, self.unborn = [*found, *self.unborn], []
        found += [] if self.hosts.provider is None else self.hosts.provider.news()
        if (text := self.hosts.server.refusals.words()) is not None:
            found.append(LauncherWarning(text))
        for happening in self.hosts.server.happened():
            match happening:
                case HostCame(guest=guest):
                    if (news := self.hosts.came(guest)) is not None:
                        found.append(news)
                case HostReady():
                    pass
                case HostGone(key=key, because=because):
                    found += self._gone(key, because)
                case HostSaid(key=key, message=message):
                    found += self._said(key, message)
        for event in found:
            if isinstance(event, WorkerExit):
                self.at.pop(event.worker, None)
                self.doomed.discard(event.worker)
        return found

    def _gone(self, key: str, because: str) -> list[LauncherEvent]:
        host = self.hosts.others.pop(key, None)
        if host is None:
            return []
        name = host.guest.here.name
        exits = [WorkerExit(w, pid, -9, host=name, lost=because) for w, pid in host.workers.items()]
        return [HostNews(name, f"is gone: {because}"), *exits]

    def _said(
        self, key: str, message: WorkerStarted | WorkerExit | Logged | ProbeAnswer
    ) -> list[LauncherEvent]:
        host = self.hosts.others.get(key)
        if host is None or isinstance(message, ProbeAnswer) or message.worker not in host.workers:
            return []
        match message:
            case Logged(worker=worker, data=data):
                news = self.logs.add(worker, data)
                return [] if news is None else [LauncherWarning(news)]
            case WorkerStarted(worker=worker, pid=pid):
                host.workers[worker] = pid
            case WorkerExit(worker=worker, code=code):
                del host.workers[worker]
                code = max(-64, min(code, 255))
                # Which host it was, and whether that is lost, is not for the host to say.
                return [msgspec.structs.replace(message, code=code, host="", lost="")]
        return [message]

    def fileno(self) -> int:
        return self.selector.fileno()  # type: ignore[attr-defined]  # epoll's

    def kill(self, worker: int) -> None:
        key = self.at.get(worker)
        self.doomed.add(worker)
        if key == "" and self.here is not None:
            self.here.kill(worker)
        elif key:
            self.hosts.server.send(key, KillWorker(worker))

    def stop(self) -> None:
        self.hosts.unload()
        if self.here is not None:
            self.here.stop()
        else:
            blank(self.fds)
        self.at.clear()
        self.doomed.clear()
        self.logs.clear()

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self.stop()
        self.hosts.close()
        if self.here is not None:
            self.here.close()
        else:
            for fd in self.fds:
                os.close(fd)
        self.selector.close()
