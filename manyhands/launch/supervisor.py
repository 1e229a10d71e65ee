# SPDX-License-Identifier: Apache-2.0
"""The supervisor: the only authority on who is in. A plain loop around `membership.decide`."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import zmq

from manyhands import events
from manyhands.errors import RequestError
from manyhands.launch import membership
from manyhands.launch.agent import Exit, Started
from manyhands.launch.control import Ask, Change, Continue, Control, Examine, Pause, Scale, StopRun
from manyhands.launch.launchers import Launcher
from manyhands.launch.membership import Cause, Situation, Worker
from manyhands.launch.messages import (
    Beat,
    Begun,
    Break,
    FromSupervisor,
    FromWorker,
    Halt,
    Hello,
    Leaving,
    Left,
    Notice,
    Part,
    Ready,
    Reply,
    SavedFile,
    Scored,
    Settings,
    Testimony,
    Trouble,
    View,
    Written,
)
from manyhands.launch.wire import Switchboard
from manyhands.world import oom_kills

POLL_MS = 100


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    rank: int
    worker: int
    pid: int
    host: str
    step: int
    samples_per_s: float
    micro_batches: int = 0
    """Of a full step, how many are dealt to it."""


@dataclass(frozen=True, slots=True)
class Incident:
    """A loss, and what became of it."""

    cause: Cause
    decided: str
    seconds: float
    """From noticing it to the view that went on."""
    step: int
    """Where training went on."""
    recomputed: int
    """Micro-batches that were computed and had to be computed again."""


class Audience(Protocol):
    """Whom the supervisor tells. The driver implements it; nothing here may block for long."""

    def event(self, event: events.AnyEvent) -> None: ...
    def beat(self, beat: Beat) -> None: ...
    def status(self, workers: list[WorkerStatus], doing: str) -> None: ...

    def begun(self, view: View, step: int, groups: list[dict[str, Any]]) -> None:
        """A view is in force from `step` on."""
        ...

    def changed(self, step: int, changes: Settings) -> None:
        """Settings in force from `step` on; durable on return."""
        ...

    def recovered(self, incident: Incident) -> None: ...

    def scored(self, step: int, scores: dict[str, float]) -> str | None:
        """Returns the reason to stop early, if there is one."""
        ...

    def written(self, step: int, attempt: int, files: list[SavedFile], blocked_s: float) -> None:
        """All workers of view `attempt` have written their files of a step."""
        ...

    def objection(
        self, changes: Settings, groups: list[dict[str, Any]], schedule: list[str]
    ) -> str | None:
        """Why these settings cannot be changed, if so."""
        ...


@dataclass(frozen=True, slots=True)
class Done:
    leader: Left
    peak_memory_bytes: int


@dataclass(slots=True)
class _Clocks:
    heard: float
    phase: float
    progress: tuple[int, float]
    ended: float = 0.0


class Supervisor:
    def __init__(
        self,
        launcher: Launcher,
        switchboard: Switchboard,
        audience: Audience,
        situation: Situation,
        *,
        start: Callable[[int], None],
        first_worker: int = 0,
        wanted: Callable[[], int] | None = None,
        control: Control | None = None,
    ) -> None:
        """`start(worker)` starts one; `wanted()` says how many the machine has room for."""
        self.launcher, self.switchboard, self.audience = launcher, switchboard, audience
        self.now, self.start, self.wanted = situation, start, wanted
        self.stop_asked: Callable[[], bool] = lambda: False
        self.control = control
        self.oom_before = oom_kills()
        self.next_worker = first_worker
        self.clocks: dict[int, _Clocks] = {}
        self.speeds: dict[int, float] = {}
        self.parts: dict[str, dict[int, Part]] = {}
        self.saving: dict[tuple[int, int], dict[int, Written]] = {}
        """(step, generation) → what its members have written of it so far."""
        self.writers: dict[int, frozenset[int]] = {}
        """Generation → its members."""
        self.groups: list[dict[str, Any]] = []
        self.schedule: list[str] = []
        self.first_step = 0
        self.step = 0
        """The newest step that is known to be done."""
        self.reached = 0
        """How many steps survivors of a loss had done."""
        self.began_at = 0.0
        self.incident: tuple[Cause, str, float] | None = None
        self.announced: set[tuple[int, int | None]] = set()
        self.asked: list[tuple[Ask, Callable[[str], None], Callable[[], str | None]]] = []
        self.peaks: dict[int, int] = {}
        self.testimonies: dict[int, Testimony] = {}
        self.audited = ""
        self.poller = zmq.Poller()
        self.poller.register(switchboard.socket, zmq.POLLIN)
        self.poller.register(launcher.fileno(), zmq.POLLIN)
        if control is not None:
            self.poller.register(control.fileno(), zmq.POLLIN)

    def run(self) -> Done | Cause:
        """Until the run is done or given up. The caller stops workers that are left over."""
        reported = 0.0
        while True:
            self.poller.poll(POLL_MS)
            for message in self.switchboard.receive():
                self._hear(message)
            for sign in self.launcher.poll():
                self._see(sign)
            self._listen()
            self._look_at_the_clock()
            while not isinstance(decision := membership.decide(self.now), membership.Wait):
                if isinstance(decision, membership.Finish):
                    self._report()
                    return Done(decision.leader, sum(self.peaks.values()))
                if isinstance(decision, membership.GiveUp):
                    return decision.cause
                self._do(decision)
            self._answer_those_who_asked()
            if time.monotonic() - reported > 0.5:
                reported = time.monotonic()
                self._report()

    # ---- doing what was decided

    def _do(self, decision: membership.Decision) -> None:
        match decision:
            case membership.Start(count=count):
                for _ in range(count):
                    self._start()
            case membership.Fence(worker=worker, because=because):
                self.now.workers[worker].fenced = because
                self.launcher.kill(worker)
            case membership.Break(because=because, cause=cause):
                self._break(because, cause)
            case membership.Halt(because=because, speeds=speeds):
                self.now.halted, self.now.running, self.now.better = because, False, speeds
                self.now.halts += 1
                self._tell_members(Halt(number=self.now.halts))
            case membership.IssueView(view=view):
                self._issue(view)
            case _:
                raise AssertionError(decision)

    def _start(self) -> None:
        number, now = self.next_worker, time.monotonic()
        self.next_worker += 1
        self.now.workers[number] = Worker(number)
        self.clocks[number] = _Clocks(now, now, (0, now))
        self.start(number)

    def _break(self, because: str, cause: Cause | None) -> None:
        self.now.broken, self.now.running = because, False
        self.now.losses += 1
        if cause is not None:
            if self.incident is None:  # losses during a recovery are symptoms of the same day
                self.incident = cause, because, time.monotonic()
            self.audience.event(
                events.Lost(
                    rank=cause.rank or 0,
                    worker=cause.worker,
                    pid=cause.pid,
                    step=cause.step,
                    what=cause.what,
                    noticed_by=cause.noticed_by,
                )
            )
        if self.now.view is not None:
            self._tell_members(Break(generation=self.now.view.generation))

    def _tell_members(self, message: FromSupervisor) -> None:
        for worker in self.now.members():
            if worker.alive:
                self.switchboard.send(worker.number, message)

    def _issue(self, view: View) -> None:
        now = self.now
        chosen = {m.worker for m in view.members}
        for worker in now.workers.values():
            if worker.alive and worker.phase in ("ready", "waiting"):
                self.switchboard.send(worker.number, view)
                self._phase(worker, "in" if worker.number in chosen else "left")
                worker.broken = False
        now.view, self.writers[view.generation] = view, frozenset(chosen)
        now.broken = now.halted = now.audit = None
        now.better = ()
        self.testimonies.clear()
        now.running = False
        self.parts.clear()
        self.began_at = time.monotonic()

    def _phase(self, worker: Worker, phase: membership.Phase) -> None:
        now = time.monotonic()
        worker.phase = phase
        clocks = self.clocks[worker.number]
        clocks.phase = clocks.heard = now
        clocks.progress = (clocks.progress[0], now)

    # ---- what launchers say

    def _see(self, sign: Started | Exit) -> None:
        worker = self.now.workers.get(sign.worker)
        if worker is None:
            return
        if isinstance(sign, Started):
            worker.pid = sign.pid
            return
        worker.exit = sign
        self.clocks[sign.worker].ended = time.monotonic()
        if worker.phase == "left":
            return
        if worker.phase == "starting":
            self.now.failed_starts += 1
        rank = membership.rank_of(self.now, sign.worker)
        self._phase(worker, "gone")
        self.now.oom_kills = oom_kills() - self.oom_before
        how = f"signal {-sign.code}" if sign.code < 0 else f"code {sign.code}"
        self.audience.event(events.Exited(rank=rank, pid=sign.pid, how=how))

    # ---- what workers say

    def _hear(self, message: FromWorker) -> None:
        now = self.now
        generation = now.view.generation if now.view else 0
        number = getattr(message, "worker", None)
        worker = now.workers.get(number) if number is not None else None
        if number is not None:
            last_words = Beat | Trouble | Left | Written  # may be read after its end was seen
            if worker is None or (worker.phase == "gone" and not isinstance(message, last_words)):
                return
            self.clocks[number].heard = time.monotonic()
        always = Hello | Trouble | Written | Notice | Leaving | Beat
        if message.generation != generation and not isinstance(message, always):
            return  # of a view that is over, or sent before there was one
        match message:
            case Hello() if worker is not None:
                worker.pid, worker.host, worker.built = message.pid, message.host, message.built
                self._phase(worker, "waiting")
                now.failed_starts = 0
            case Begun():
                self._begun(message)
            case Ready() if worker is not None:
                worker.step, worker.broken = message.step, message.broken
                self.reached = max(self.reached, message.step)
                now.begun = now.begun or message.held
                if message.differs is not None:
                    now.audit = message.differs[1]
                    self.audited = "workers differed"
                if worker.phase == "in":
                    self._phase(worker, "ready")
            case Leaving() if worker is not None:
                worker.leaving = True
                text = f"worker {worker.number} was asked to go; it hands over after this step"
                self.audience.event(events.Warned(text=text))
            case Beat() if worker is not None:
                self._beat(worker, message)
            case Part():
                self._collect(message)
            case Scored(step=step, round=round, scores=scores):
                now.scored, now.enough = step, self.audience.scored(step, scores)
                self._tell_members(Reply(round=round, stop=now.enough))
            case Written():
                self._written(message)
            case Trouble() if worker is not None:
                worker.trouble = worker.trouble or message
                now.troubles.append(message)
            case Testimony() if worker is not None:
                self._testified(message)
            case Notice(text=text):
                self.audience.event(events.Warned(text=text))
            case Left() if worker is not None:
                worker.left = message
                self.peaks[worker.number] = message.peak_memory_bytes
                self.step = max(self.step, message.step)
                self._phase(worker, "left")
            case _:
                pass

    def _begun(self, message: Begun) -> None:
        now, view = self.now, self.now.view
        assert view is not None
        now.begun = True
        now.running = now.halted is None and now.broken is None
        if message.step > self.step:
            now.losses = 0
        self.step, self.first_step = max(self.step, message.step), message.step
        self.groups, self.schedule = message.groups, message.schedule
        self.began_at = time.monotonic()
        self.audience.begun(view, message.step, message.groups)
        if view.changes:
            self.audience.changed(message.step, view.changes)
            now.journal.setdefault(message.step, {}).update(view.changes)
            now.changes = {k: v for k, v in now.changes.items() if view.changes.get(k) != v}
            self._tell_members(Reply(round=f"go-{view.generation}"))
        if self.incident is not None:
            cause, decided, noticed = self.incident
            self.incident = None
            reached = max(cause.step, self.reached)
            self.audience.recovered(
                Incident(
                    replace(cause, step=reached),
                    f"{decided}; {_count(len(view.members), 'worker')} went on",
                    time.monotonic() - noticed,
                    message.step,
                    now.micro_batches if message.step <= reached else 0,
                )
            )

    def _beat(self, worker: Worker, beat: Beat) -> None:
        clocks = self.clocks[worker.number]
        if beat.progress != clocks.progress[0] or beat.waiting:
            clocks.progress = (beat.progress, time.monotonic())
        worker.step, worker.seasoned = beat.step, beat.seasoned
        worker.micro_batch_s = beat.micro_batch_s or worker.micro_batch_s
        self.speeds[worker.number] = beat.samples_per_s
        if beat.step > self.step:
            self.step = beat.step
            self.now.losses = 0
        for trouble in membership.suspicious(self.now, self.step):
            if (trouble.step, trouble.micro_batch) not in self.announced:
                self.announced.add((trouble.step, trouble.micro_batch))
                self._announce(trouble)
        self.audience.beat(beat)

    def _announce(self, trouble: Trouble) -> None:
        text = (
            f"worker {trouble.worker} failed at step {trouble.step}, micro-batch "
            f"{trouble.micro_batch} ({trouble.text}), which another worker then computed without "
            "an error: that worker's process or machine is suspect."
        )
        self.audience.event(events.Warned(text=text))

    def _collect(self, part: Part) -> None:
        view = self.now.view
        rank = view.rank_of(part.worker) if view is not None else None
        if view is None or rank is None:
            return
        parts = self.parts.setdefault(part.round, {})
        parts[rank] = part
        if len(parts) < len(view.members):
            return
        payloads = [parts[rank].payload for rank in range(len(parts))]
        del self.parts[part.round]
        for member in view.members:
            if part.to_all or member.rank == 0:
                self.switchboard.send(member.worker, Reply(round=part.round, parts=payloads))

    def _written(self, message: Written) -> None:
        """A step that somebody did not live to write is never whole; the next one will be."""
        key = (message.step, message.attempt)
        written = self.saving.setdefault(key, {})
        written[message.worker] = message
        if written.keys() == self.writers.get(message.attempt):
            del self.saving[key]
            files = [f for w in written.values() for f in w.files]
            blocked_s = max(w.blocked_s for w in written.values())
            self.audience.written(message.step, message.attempt, files, blocked_s)
            self.now.saved = self.now.restore = max(self.now.saved, message.step)

    def _testified(self, message: Testimony) -> None:
        """When all members have spoken they are judged."""
        now, view = self.now, self.now.view
        assert view is not None
        self.testimonies[message.worker] = message
        if self.testimonies.keys() < {m.worker for m in view.members}:
            return
        found = membership.judge({w: tuple(t.digests) for w, t in self.testimonies.items()})
        self.testimonies.clear()
        what = f"micro-batch {message.micro_batch} of step {message.step}"
        self.audited = f"{what}: {found.text}"
        guilty = [f"worker {w}: {why}" for w, why in found.guilty.items()]
        self.audience.event(
            events.Audited(
                step=message.step,
                micro_batch=message.micro_batch,
                text=found.text,
                guilty=sorted(found.guilty),
            )
        )
        if found.hopeless:
            rank = membership.rank_of(now, message.worker)
            now.unsteady = Cause(
                rank,
                message.worker,
                now.workers[message.worker].pid,
                "",
                message.step,
                found.text,
                noticed_by="an audit",
                micro_batch=message.micro_batch,
            )
        for worker, why in found.guilty.items():
            now.workers[worker].wrong = f"an audit of {what} found that {why}"
        asked_in_vain = now.stop or now.failed_starts >= membership.MOST_FAILED_STARTS
        found = replace(found, more=found.more and not asked_in_vain)
        now.witnesses = 1 if found.more else 0
        now.audit = message.micro_batch if found.more else None
        if guilty or found.more:
            self.audience.event(events.Warned(text=f"{self.audited}. {'; '.join(guilty)}"))
        if found.more:
            now.halted, now.running = "a third opinion is needed", False
            self._tell_members(Break(generation=view.generation))
        elif not guilty:
            self._tell_members(Reply(round=f"judged-{view.generation}"))

    # ---- what people ask for

    def _listen(self) -> None:
        if self.stop_asked() and not self.now.stop:
            if not self.now.begun:
                raise KeyboardInterrupt  # nothing has been computed yet
            self.now.stop = True
        if self.wanted is not None and not self.now.stop:
            self.now.wanted = self.wanted()
        for ask, answer in self.control.receive() if self.control is not None else ():
            try:
                self.asked.append((ask, answer, self._obey(ask)))
            except RequestError as error:
                answer(f"error: {error}")

    def _obey(self, ask: Ask) -> Callable[[], str | None]:
        """Returns a question: is it done? Its answer is what to tell whoever asked."""
        now = self.now
        match ask:
            case Scale(workers=workers):
                if workers < 1 or now.most < workers <= now.micro_batches:
                    raise RequestError(f"this run can use 1 to {now.most} workers, not {workers}.")
                if workers > now.micro_batches:
                    raise RequestError(
                        f"{workers} workers, but a step has only {now.micro_batches} micro-batches "
                        "to deal out: lower train.micro_batch in a new run."
                    )
                before, now.wanted, self.wanted, now.failed_starts = now.wanted, workers, None, 0
                now.least = min(now.least, workers)
                self.audience.event(events.Scaled(before=before, workers=workers, step=self.step))
                return lambda: (
                    f"{workers} worker{'s' * (workers != 1)} since step {self.first_step}"
                    if now.running and len(now.members()) == workers
                    else None
                )
            case Change(settings=settings):
                if not self.groups:
                    raise RequestError("training has not begun yet; try again in a moment")
                if (
                    problem := self.audience.objection(settings, self.groups, self.schedule)
                ) is not None:
                    raise RequestError(problem)
                now.changes = {**now.changes, **settings}
                said = ", ".join(f"{k} = {v}" for k, v in settings.items())
                return lambda: (
                    f"{said}, from step {self.first_step} on"
                    if now.running and not now.changes
                    else None
                )
            case Pause():
                now.paused = True
                return lambda: (
                    f"paused after step {max(w.step for w in now.members())}"
                    if (now.halted or now.broken)
                    and not any(w.phase == "in" for w in now.members())
                    else None
                )
            case Continue():
                now.paused = False
                return lambda: "training" if now.running else None
            case StopRun():
                now.stop = True
                return lambda: "stopping after the next step; saving"
            case Examine():
                if len(now.members()) < 2:
                    raise RequestError("an audit needs two workers: manyhands scale RUN 2")
                now.audit, self.audited = self.step % now.micro_batches, ""
                return lambda: self.audited or None

    def _answer_those_who_asked(self) -> None:
        for item in list(self.asked):
            _, answer, done = item
            if (text := done()) is not None:
                answer(text)
                self.asked.remove(item)

    # ---- clocks

    def _look_at_the_clock(self) -> None:
        now = time.monotonic()
        for worker in self.now.workers.values():
            clocks = self.clocks[worker.number]
            worker.silent_s, worker.phase_s = now - clocks.heard, now - clocks.phase
            worker.stuck_s = now - clocks.progress[1]
            worker.ended_s = now - clocks.ended if clocks.ended else 0.0
        self.now.measured_s = now - self.began_at if self.now.running else 0.0

    def _report(self) -> None:
        view = self.now.view
        if view is None:
            return
        dealt = membership.deal(self.now.micro_batches, tuple(view.speeds))
        resting = self.now.paused and not self.now.running
        doing = "paused" if resting else "running"
        self.audience.status(
            [
                WorkerStatus(
                    m.rank,
                    m.worker,
                    m.pid,
                    m.host,
                    self.now.workers[m.worker].step,
                    self.speeds.get(m.worker, 0.0),
                    len(dealt[m.rank]),
                )
                for m in view.members
                if self.now.workers[m.worker].phase != "gone"
            ],
            doing,
        )


def _count(n: int, thing: str) -> str:
    return f"{n} {thing}{'s' * (n != 1)}"
