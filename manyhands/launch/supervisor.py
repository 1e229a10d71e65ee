# SPDX-License-Identifier: Apache-2.0
"""The supervisor: the only authority on who is in. A plain loop around `membership.decide`."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import zmq

from manyhands import events
from manyhands.launch import membership
from manyhands.launch.agent import Exit, Started
from manyhands.launch.launchers import Launcher
from manyhands.launch.membership import Cause, Finish, GiveUp, IssueView, Situation
from manyhands.launch.messages import (
    Beat,
    FromWorker,
    Hello,
    Left,
    Member,
    Notice,
    Part,
    Reply,
    SavedFile,
    Scored,
    Stop,
    Trouble,
    Written,
)
from manyhands.launch.wire import Switchboard
from manyhands.world import oom_kills

POLL_MS = 100


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    rank: int
    pid: int
    host: str
    step: int
    samples_per_s: float


class Audience(Protocol):
    """Whom the supervisor tells. The driver implements it; nothing here may block for long."""

    def event(self, event: events.AnyEvent) -> None: ...
    def beat(self, beat: Beat) -> None: ...
    def status(self, workers: list[WorkerStatus]) -> None: ...
    def scored(self, step: int, scores: dict[str, float]) -> str | None:
        """Returns the reason to stop early, if there is one."""
        ...

    def written(self, step: int, files: list[SavedFile], blocked_s: float) -> None:
        """All workers have written their files of a step."""
        ...


@dataclass(frozen=True, slots=True)
class Done:
    leader: Left
    peak_memory_bytes: int


class Supervisor:
    def __init__(
        self,
        launcher: Launcher,
        switchboard: Switchboard,
        audience: Audience,
        *,
        wanted: int,
        stop_asked: Callable[[], bool],
    ) -> None:
        self.launcher, self.switchboard, self.audience = launcher, switchboard, audience
        self.stop_asked, self.stop_sent = stop_asked, False
        self.now = Situation(wanted)
        self.oom_before = oom_kills()
        self.speeds: dict[int, float] = {}
        self.parts: dict[str, dict[int, Part]] = {}
        self.files: dict[int, dict[int, Written]] = {}
        self.first_symptom: float | None = None
        self.poller = zmq.Poller()
        self.poller.register(switchboard.socket, zmq.POLLIN)
        self.poller.register(launcher.fileno(), zmq.POLLIN)

    def run(self) -> Done | Cause:
        """Until the run is done or given up. The caller stops workers that are left over."""
        reported = 0.0
        while True:
            self.poller.poll(POLL_MS)
            for message in self.switchboard.receive():
                self._hear(message)
            for sign in self.launcher.poll():
                self._see(sign)
            self._look_at_the_clock()
            match membership.decide(self.now):
                case IssueView(view):
                    self._issue(view)
                case Finish(leader):
                    self._report()
                    peaks = [left.peak_memory_bytes for left in self.now.left.values()]
                    return Done(leader, sum(peaks))
                case GiveUp(cause):
                    return cause
                case _:
                    pass
            if self.stop_asked() and not self.stop_sent:
                self._send_stop()
            if time.monotonic() - reported > 0.5:
                reported = time.monotonic()
                self._report()

    def _look_at_the_clock(self) -> None:
        if membership.has_symptoms(self.now):
            self.first_symptom = self.first_symptom or time.monotonic()
            self.now.symptoms_for_s = time.monotonic() - self.first_symptom
            self.now.oom_kills = oom_kills() - self.oom_before

    def _issue(self, view: membership.View) -> None:
        self.now.view = view
        for member in view.members:
            self.switchboard.send(member.worker, view)
        members = {m.rank: m.pid for m in view.members}
        self.audience.event(
            events.Viewed(
                generation=view.generation,
                first_step=view.first_step,
                members=members,
                because=view.because,
            )
        )

    def _send_stop(self) -> None:
        """Every worker hears it; they stop after the first step in which all have heard."""
        if self.now.view is None:
            raise KeyboardInterrupt  # nothing has been computed yet
        self.stop_sent = True
        for member in self.now.view.members:
            self.switchboard.send(member.worker, Stop(number=1))

    def _see(self, sign: Started | Exit) -> None:
        if isinstance(sign, Exit):
            self.now.exits.append(sign)
            if sign.worker not in self.now.left:
                rank = self.now.view.rank_of(sign.worker) if self.now.view else sign.worker
                how = f"signal {-sign.code}" if sign.code < 0 else f"code {sign.code}"
                self.audience.event(events.Exited(rank=rank, pid=sign.pid, how=how))

    def _hear(self, message: FromWorker) -> None:
        generation = self.now.view.generation if self.now.view else 0
        if message.generation != generation and not isinstance(message, Hello | Trouble):
            return  # of a view that is over, or sent before there was one
        match message:
            case Hello(worker=worker, pid=pid, host=host):
                self.now.members[worker] = Member(worker, worker, pid, host)
            case Beat():
                self.now.steps[message.worker] = message.step
                self.speeds[message.worker] = message.samples_per_s
                self.audience.beat(message)
            case Part():
                self._collect(message)
            case Scored(step=step, round=round, scores=scores):
                self._answer(round, stop=self.audience.scored(step, scores))
            case Written():
                self._written(message)
            case Trouble():
                self.now.troubles.append(message)
            case Notice(text=text):
                self.audience.event(events.Warned(text=text))
            case Left():
                self.now.left[message.worker] = message

    def _collect(self, part: Part) -> None:
        view = self.now.view
        assert view is not None, "workers send parts only inside a view"
        parts = self.parts.setdefault(part.round, {})
        parts[view.rank_of(part.worker)] = part
        if len(parts) < len(view.members):
            return
        payloads = [parts[rank].payload for rank in range(len(parts))]
        del self.parts[part.round]
        for member in view.members:
            if part.to_all or member.rank == 0:
                self.switchboard.send(member.worker, Reply(round=part.round, parts=payloads))

    def _answer(self, round: str, *, stop: str | None) -> None:
        assert self.now.view is not None
        for member in self.now.view.members:
            self.switchboard.send(member.worker, Reply(round=round, stop=stop))

    def _written(self, message: Written) -> None:
        assert self.now.view is not None
        written = self.files.setdefault(message.step, {})
        written[message.worker] = message
        if len(written) == len(self.now.view.members):
            del self.files[message.step]
            files = [f for w in written.values() for f in w.files]
            blocked_s = max(w.blocked_s for w in written.values())
            self.audience.written(message.step, files, blocked_s)

    def _report(self) -> None:
        if self.now.view is not None:
            self.audience.status(
                [
                    WorkerStatus(
                        m.rank,
                        m.pid,
                        m.host,
                        self.now.steps.get(m.worker, 0),
                        self.speeds.get(m.worker, 0.0),
                    )
                    for m in self.now.view.members
                ]
            )
