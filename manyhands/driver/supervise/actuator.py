# SPDX-License-Identifier: Apache-2.0
"""What `membership.decide` has decided, done: workers are started and fenced, hosts dropped, views
broken, halted and issued."""

import time
from collections.abc import Callable

import msgspec

from manyhands.driver.supervise import decisions
from manyhands.driver.supervise.liveness import Liveness
from manyhands.driver.supervise.uneven_deal import redealt
from manyhands.driver.supervise.worker_states import Situation, WorkerState
from manyhands.launch.engines.launcher import Launcher, WorkerPlace
from manyhands.launch.wire.control_channel import SupervisorChannel
from manyhands.values import events
from manyhands.values.messages import Break, FromSupervisor, Halt
from manyhands.values.verdict import Cause
from manyhands.values.view import View


class Actuator:
    """It changes the situation by nothing but what it does."""

    def __init__(
        self,
        launcher: Launcher,
        channel: SupervisorChannel,
        situation: Situation,
        liveness: Liveness,
        tell: events.EventSink,
        start: Callable[[int], WorkerPlace],
        first_worker: int,
    ) -> None:
        """`start(worker)` starts one, and says where."""
        self.launcher, self.channel, self.now, self.tell = launcher, channel, situation, tell
        self.liveness, self.start, self.next_worker = liveness, start, first_worker
        self.views: dict[int, tuple[int, ...]] = {}
        """Generation → its members, by rank."""
        self.incident: tuple[Cause, str, float] | None = None
        """A loss that is not recovered from yet: what, what was decided, when."""

    def carry_out(self, decision: decisions.Decision) -> None:
        match decision:
            case decisions.StartWorkers(count=count):
                for _ in range(count):
                    self._start()
            case decisions.Fence(worker=worker, because=because, stuck=stuck):
                fenced = self.now.workers[worker]
                fenced.fenced, fenced.stuck = because, stuck
                self.launcher.kill(worker)
            case decisions.DropHost(at=at, because=because):
                self.launcher.hosts.drop(at, because)
                self.now.capacity = self.launcher.hosts.look().capacity
                for worker in self.now.workers.values():
                    if worker.at == at and worker.alive:
                        worker.fenced = because
            case decisions.BreakView(because=because, cause=cause):
                self._break(because, cause)
            case decisions.HaltView(because=because, speeds=speeds):
                self.now.redealt = redealt(self.now) if speeds else self.now.redealt
                self.now.halted, self.now.running, self.now.better = because, False, speeds
                self.now.halts += 1
                self.tell_members(Halt(number=self.now.halts))
            case decisions.IssueView(view=view):
                self._issue(view)
            case _:
                raise AssertionError(decision)

    def _start(self) -> None:
        number = self.next_worker
        self.next_worker += 1
        self.now.workers[number] = WorkerState(number)
        self.liveness.start(number)
        berth, worker = self.start(number), self.now.workers[number]
        worker.at, worker.at_name = berth.at, berth.name

    def _break(self, because: str, cause: Cause | None) -> None:
        self.now.broken, self.now.running = because, False
        self.now.losses += 1
        if cause is not None:
            if self.incident is None:  # losses during a recovery are symptoms of the same day
                self.incident = cause, because, time.monotonic()
            self.tell(
                events.Lost(
                    rank=cause.rank or 0,
                    worker=cause.worker,
                    pid=cause.pid,
                    step=cause.step,
                    what=cause.what,
                    noticed_by=cause.noticed_by,
                    ranks=list(cause.ranks),
                )
            )
        if self.now.view is not None:
            self.tell_members(Break(generation=self.now.view.generation))

    def tell_members(self, message: FromSupervisor) -> None:
        for worker in self.now.members():
            if worker.alive:
                self.channel.send(worker.number, message)

    def _issue(self, view: View) -> None:
        now = self.now
        chosen = {m.worker for m in view.members}
        among = msgspec.structs.replace(view, secret=now.secret)
        for worker in now.workers.values():
            if worker.alive and worker.phase in ("ready", "waiting"):
                inside = worker.number in chosen
                self.channel.send(worker.number, among if inside else view)
                self.liveness.enter(worker, "in" if inside else "left")
                worker.broken, worker.lost = False, frozenset()
        now.view = view
        self.views[view.generation] = tuple(m.worker for m in view.members)
        now.broken = now.halted = now.audit = None
        now.better = ()
        now.running = False
