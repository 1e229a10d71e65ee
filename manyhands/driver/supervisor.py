# SPDX-License-Identifier: Apache-2.0
"""The supervisor: the only authority on who is in. A plain loop around `membership.decide`."""

import time
from collections.abc import Callable
from itertools import accumulate

import msgspec
import zmq

from manyhands.driver.bookkeeping import Bookkeeping
from manyhands.driver.live.live_requests import LiveRequests
from manyhands.driver.run_file_server import FileServer
from manyhands.driver.supervise import decisions
from manyhands.driver.supervise.actuator import Actuator
from manyhands.driver.supervise.audit import Audit
from manyhands.driver.supervise.host_links import HostLinks
from manyhands.driver.supervise.host_roster import with_ranks, worker_statuses
from manyhands.driver.supervise.liveness import Liveness
from manyhands.driver.supervise.membership import decide, suspicious
from manyhands.driver.supervise.open_rounds import MOST_ROUNDS, OpenRounds
from manyhands.driver.supervise.plausible import objection, odd_work
from manyhands.driver.supervise.room_to_compute import RoomToCompute
from manyhands.driver.supervise.run_outcome import Done, Incident
from manyhands.driver.supervise.save_timer import SaveTimer
from manyhands.driver.supervise.servers import hands_in_words
from manyhands.driver.supervise.unlike_hosts import UnlikeHosts, first_host
from manyhands.driver.supervise.worker_states import Situation, WorkerState
from manyhands.launch.engines.fork_agent import WorkerStarted
from manyhands.launch.engines.launcher import (
    HostNews,
    Launcher,
    LauncherEvent,
    LauncherWarning,
    WorkerPlace,
)
from manyhands.launch.wire.control_channel import Nonsense, SupervisorChannel
from manyhands.values import events
from manyhands.values.config import HEARD_SCORE
from manyhands.values.kernels import distinct
from manyhands.values.messages import (
    Beat,
    Begun,
    Drew,
    FromWorker,
    Hello,
    Leaving,
    Left,
    Measured,
    Merged,
    Notice,
    Passed,
    Read,
    ReadFile,
    Ready,
    Reply,
    RoundPart,
    SaveNow,
    Scored,
    StoreFile,
    Testimony,
    Trouble,
    Written,
)
from manyhands.values.verdict import Cause
from manyhands.values.work_in_hand import WorkInHand

POLL_MS = 100


class Supervisor:
    def __init__(
        self,
        launcher: Launcher,
        channel: SupervisorChannel,
        books: Bookkeeping,
        files: FileServer,
        situation: Situation,
        *,
        requests: LiveRequests,
        start: Callable[[int], WorkerPlace],
        records_of: Callable[[WorkInHand], list[int]],
        first_worker: int = 0,
    ) -> None:
        """`start(worker)` starts one, and says where."""
        self.launcher, self.channel, self.books, self.files = launcher, channel, books, files
        self.now, self.requests, self.records_of = situation, requests, records_of
        self.liveness, self.audit = Liveness(), Audit(situation, books.event)
        self.actuator = Actuator(
            launcher, channel, situation, self.liveness, books.event, start, first_worker
        )
        self.links = HostLinks(situation, books.event)
        self.unlike = UnlikeHosts(situation, books.event)
        self.room = RoomToCompute(situation, books.event)
        self.save_timer = SaveTimer(lambda: books.live.config.checkpoint.by_clock_s)
        self.rounds = OpenRounds()
        self.saving: dict[tuple[int, int], dict[int, Written]] = {}
        """(step, generation) → what its members have written of it so far."""
        self.reached = 0
        """How many steps survivors of a loss had done."""
        self.announced: set[tuple[int, int | None]] = set()
        self.poller = zmq.Poller()
        self.poller.register(channel.socket, zmq.POLLIN)
        self.poller.register(launcher.fileno(), zmq.POLLIN)
        self.poller.register(requests.control.fileno(), zmq.POLLIN)

    def run(self) -> Done | Cause:
        """Until the run is done or given up. The caller stops workers that are left over."""
        reported = 0.0
        while True:
            self.poller.poll(POLL_MS)
            for message in self.channel.receive():
                if isinstance(message, Nonsense):
                    self._blame(message.worker, message.why)
                else:
                    self._hear(message)
            for sign in self.launcher.poll():
                self._see(sign)
            hosts = self.launcher.hosts.look()
            self._make_room(hosts.capacity)
            self.now.hosts = hosts.count
            for worker in self.now.workers.values():
                worker.host_silent_s = hosts.silent_s.get(worker.at, 0.0)
            self.requests.listen()
            self.unlike.look()
            self.liveness.write_down(self.now)
            while not isinstance(decision := decide(self.now), decisions.Wait):
                if isinstance(decision, decisions.Finish):
                    self._report()
                    lefts = [w.left for w in self.now.workers.values() if w.left is not None]
                    return Done(decision.leader, sum(m.peak_memory_bytes for m in lefts))
                if isinstance(decision, decisions.GiveUp):
                    return self._with_records(decision.cause)
                self.actuator.carry_out(decision)
                if isinstance(decision, decisions.IssueView):  # what was said before is over
                    self.audit.begin()
                    self.rounds.clear()
            self.room.look()
            if self.now.running and self.save_timer.due():
                self.now.halts += 1
                self.actuator.tell_members(SaveNow(number=self.now.halts))
            self.requests.answer()
            if time.monotonic() - reported > 0.5:
                reported = time.monotonic()
                self._report()

    def _with_records(self, cause: Cause) -> Cause:
        """Who died could not say which records were in its hands; they follow from the place."""
        if cause.micro_batch is None or cause.records:
            return cause
        kind = "evaluate" if cause.held_out else "compute"
        records = self.records_of(WorkInHand(kind, cause.step, cause.micro_batch))
        return msgspec.structs.replace(cause, records=tuple(records))

    def _make_room(self, capacity: int | None) -> None:
        """What failed on the hosts that are here may succeed on one that comes."""
        if capacity is not None and capacity > (self.now.capacity or 0):
            self.now.failed_starts = 0
        self.now.capacity = capacity

    # ---- what launchers say

    def _see(self, sign: LauncherEvent) -> None:
        if isinstance(sign, HostNews):
            self.books.event(events.Hosted(host=sign.host, what=sign.what))
            return
        if isinstance(sign, LauncherWarning):
            self.books.event(events.Warned(text=sign.text))
            return
        worker = self.now.workers.get(sign.worker)
        if worker is None:
            return
        if isinstance(sign, WorkerStarted):
            worker.pid = sign.pid
            if sign.note:
                self.books.event(events.Warned(text=f"{worker.host_name}: {sign.note}"))
            return
        worker.exit = sign
        if sign.work is not None and odd_work(self.now, sign.work, steps=self._steps) is None:
            worker.work = sign.work
        if sign.lost:
            self.now.held -= {worker.at}
        self.liveness.ended(sign.worker)
        self.channel.assembly.forget(sign.worker)
        self.channel.workers.ended(sign.worker)
        if worker.phase == "left":
            return
        if worker.phase == "starting" and not sign.lost:
            self.now.failed_starts += 1
        rank = self.now.rank_of(sign.worker)
        self.liveness.enter(worker, "gone")
        if sign.code != 0:  # its Left may still be on the way; if none comes, it is told as Lost
            how = f"signal {-sign.code}" if sign.code < 0 else f"code {sign.code}"
            self.books.event(events.Exited(rank=rank, pid=sign.pid, how=how))

    # ---- what workers say

    @property
    def _steps(self) -> int:
        return self.books.progress.total_steps

    def _blame(self, number: int, why: str) -> None:
        """A worker said what no worker says: it is broken, or somebody else. It alone suffers."""
        worker = self.now.workers.get(number)
        if worker is None or not worker.alive:
            self.channel.router.refuse()
        elif worker.wrong is None:
            worker.wrong = f"it said what no worker says: {why}"
            if not self.now.replaceable:
                self.books.event(events.Warned(text=f"worker {number}: {worker.wrong}"))

    def _hear(self, message: FromWorker) -> None:
        now = self.now
        generation = now.view.generation if now.view else 0
        worker = now.workers.get(message.worker)
        if worker is None:
            self.channel.router.refuse()
            return
        # These may be read after its end was seen.
        last_words = (
            Begun
            | Beat
            | Scored
            | Trouble
            | Notice
            | Passed
            | Merged
            | Drew
            | Read
            | Left
            | Written
        )
        if worker.phase == "gone" and not isinstance(message, last_words):
            return
        self.liveness.heard(worker.number)
        always = (
            Hello | Trouble | Written | StoreFile | ReadFile | Notice | Leaving | Beat | Drew | Read
        )
        if message.generation < generation and not isinstance(message, always):
            return  # of a view that is over, or sent before there was one
        why = objection(now, worker, message, steps=self._steps, views=self.actuator.views)
        if why is not None:
            self._blame(worker.number, why)
            return
        match message:
            case Hello():
                worker.pid, worker.host, worker.built = message.pid, message.host, message.built
                worker.kernels = message.kernels
                worker.peer_address = message.peer_address
                worker.cache, worker.shards = message.cache, message.shards
                worker.most_servers = message.most_servers
                self.liveness.enter(worker, "waiting")
                now.failed_starts = 0
            case Begun():
                self._begun(message)
            case Ready():
                worker.step, worker.broken = message.step, message.broken
                worker.held = message.held
                if not message.held:
                    now.held -= {worker.at}
                worker.lost = self._hosts(message.lost)
                self.reached = max(self.reached, message.step)
                now.begun = now.begun or message.held
                if message.differs is not None:
                    now.audit, now.audited = message.differs[1], "workers differed"
                if worker.phase == "in":
                    self.liveness.enter(worker, "ready")
            case Leaving():
                worker.leaving = True
                text = f"worker {worker.number} was asked to go; it hands over after this step"
                self.books.event(events.Warned(text=text))
            case Measured():
                self.links.hear(worker, message)
            case Beat():
                self._beat(worker, message)
            case RoundPart():
                self._collect(message)
            case Scored(step=step, round=round, scores=scores):
                now.scored, now.enough = step, self.books.scored(step, scores)
                heard = self.books.heard(step, scores) if message.heard else None
                if heard is not None:
                    now.journal.setdefault(step, {}).setdefault(HEARD_SCORE, heard)
                self.actuator.tell_members(Reply(round=round, stop=now.enough, heard=heard))
            case Written():
                self._written(message)
            case StoreFile() | ReadFile():
                self.channel.send(worker.number, self.files.serve(message))
            case Trouble():
                worker.trouble = worker.trouble or message
                now.troubles.append(message)
            case Testimony():
                if (answer := self.audit.hear(message)) is not None:
                    self.actuator.tell_members(answer)
            case Notice(text=text):
                self.books.event(events.Warned(text=text))
            case Passed(step=step, why=why):
                self.books.skipped(step, why)
            case Merged():
                self.books.merged(message)
            case Drew(step=step, digest=digest):
                self.books.drew(worker.number, step, digest)
            case Read(step=step, digest=digest):
                self.books.read(worker.number, step, digest)
            case Left():
                worker.left = message
                now.step = max(now.step, message.step)
                self.liveness.enter(worker, "left")
            case _:
                pass

    def _hosts(self, numbers: list[int]) -> frozenset[str]:
        """Hosts of the current view, by the launcher's names for them."""
        assert self.now.view is not None
        members, firsts = self.now.members(), list(accumulate(self.now.view.hosts, initial=0))
        return frozenset(members[firsts[n]].at for n in numbers if 0 <= n < len(firsts) - 1)

    def _begun(self, message: Begun) -> None:
        now, view = self.now, self.now.view
        assert view is not None
        now.begun, now.first_host = True, first_host(now)
        if not now.private:
            now.held = frozenset(w.at for w in now.members())
        now.running = now.halted is None and now.broken is None
        if message.step > now.step:
            now.losses = 0
        now.step, now.first_step = max(now.step, message.step), message.step
        self.liveness.begin()
        kernels = distinct([w.kernels for w in now.members() if w.kernels is not None])
        self.books.begun(view, message.step, message.groups, message.schedule, kernels)
        if view.changes:
            self.books.changed(message.step, view.changes)
            now.journal.setdefault(message.step, {}).update(view.changes)
            now.changes = {k: v for k, v in now.changes.items() if view.changes.get(k) != v}
            self.actuator.tell_members(Reply(round=f"go-{view.generation}"))
        if self.actuator.incident is not None:
            every_steps = self.books.live.config.checkpoint.every_steps
            self.save_timer.recovered(every_steps, now.saved, message.step)
            cause, decided, noticed = self.actuator.incident
            self.actuator.incident = None
            reached = max(cause.step, self.reached)
            self.books.recovered(
                Incident(
                    msgspec.structs.replace(cause, step=reached),
                    f"{decided}; {hands_in_words(view)} went on",
                    time.monotonic() - noticed,
                    message.step,
                    now.micro_batches if message.step <= reached else 0,
                )
            )
        self.reached = message.step

    def _beat(self, worker: WorkerState, beat: Beat) -> None:
        now = self.now
        if self.liveness.beat(beat) and worker.phase == "starting":
            self.liveness.enter(worker, "starting")  # it fetches data: that may take its time
        worker.step, worker.where = beat.step, beat.where
        if worker.exit is None:  # else it has left word of what it was at
            worker.work, worker.first = beat.work, beat.first
        worker.micro_batch_s = beat.micro_batch_s or worker.micro_batch_s
        worker.samples_per_s = beat.samples_per_s
        if beat.step > now.step:
            now.step, now.losses = beat.step, 0
        for trouble in suspicious(now, now.step) if not now.merges else ():
            if (trouble.step, trouble.micro_batch) not in self.announced:
                self.announced.add((trouble.step, trouble.micro_batch))
                self._announce(trouble)
        self.books.beat(beat)

    def _announce(self, trouble: Trouble) -> None:
        text = (
            f"worker {trouble.worker} failed at step {trouble.step}, micro-batch "
            f"{trouble.micro_batch} ({trouble.text}), which another worker then computed without "
            "an error: that worker's process or machine is suspect."
        )
        self.books.event(events.Warned(text=text))

    def _collect(self, part: RoundPart) -> None:
        view = self.now.view
        rank = view.rank_of(part.worker) if view is not None else None
        if view is None or rank is None:
            return
        if self.rounds.of(rank) >= MOST_ROUNDS:
            self._blame(part.worker, f"it takes part in more than {MOST_ROUNDS} rounds at a time")
            return
        if (payloads := self.rounds.add(part, rank, len(view.members))) is None:
            return
        for member in view.members:
            if part.to_all or member.rank == 0:
                self.channel.send(member.worker, Reply(round=part.round, parts=payloads))

    def _written(self, message: Written) -> None:
        """A step that somebody did not live to write is never whole; one is saved right after the
        recovery (save_timer.py)."""
        key = (message.step, message.attempt)
        written = self.saving.setdefault(key, {})
        written[message.worker] = message
        if written.keys() == set(self.actuator.views[message.attempt]):
            del self.saving[key]
            files = [f for w in written.values() for f in w.files]
            blocked_s = max(w.blocked_s for w in written.values())
            self.books.written(message.step, message.attempt, files, blocked_s)
            self.save_timer.saved(blocked_s, max(w.writing_s for w in written.values()))
            self.now.saved = self.now.restore = max(self.now.saved, message.step)

    def _report(self) -> None:
        if (text := self.channel.refusals.words()) is not None:
            self.books.event(events.Warned(text=text))
        view = self.now.view
        if view is None:
            return
        self.links.look()
        resting = self.now.paused and not self.now.running
        doing = "paused" if resting else "running"
        self.books.status(
            worker_statuses(self.now, view),
            with_ranks(self.launcher.hosts.roster(), self.now),
            self.links.present(),
            doing,
        )
