# SPDX-License-Identifier: Apache-2.0
"""What people ask for while a run goes on, and when they are told that it has been done."""

from collections.abc import Callable

from manyhands.driver.live.command_socket import (
    Ask,
    Change,
    CommandSocket,
    Continue,
    Dismiss,
    Examine,
    Pause,
    Scale,
    StopRun,
)
from manyhands.driver.supervise.servers import servers_in
from manyhands.driver.supervise.speed_control import SpeedControl
from manyhands.driver.supervise.worker_states import Situation
from manyhands.values import events
from manyhands.values.credentials import new_secret
from manyhands.values.errors import RequestError
from manyhands.values.machine import MOST_RANKS
from manyhands.values.view import Settings

IsDone = Callable[[], str | None]
"""Is it done? If so, what to tell whoever asked for it."""

Objection = Callable[[Settings], str | None]


class LiveRequests:
    """Writes what they want into the situation; `membership.decide` does the rest."""

    def __init__(
        self,
        situation: Situation,
        tell: events.EventSink,
        control: CommandSocket,
        *,
        objection: Objection,
        room: Callable[[], int] | None,
        want: Callable[[int], None],
        withdraw: Callable[[str], str],
        revoke: Callable[[int], None],
        speed: SpeedControl | None = None,
    ) -> None:
        """`objection` says why settings cannot be changed, if so. `room()` says how many workers
        the machine has room for, if that may change. `want` tells the launcher how many somebody
        wants; `speed` chooses them for a wished speed. `withdraw` drops a host for good,
        `revoke` takes a worker's key away."""
        self.now, self.tell, self.control, self.room = situation, tell, control, room
        self.objection = objection
        self.want, self.withdraw, self.speed = want, withdraw, speed
        self.revoke = revoke
        self.stop_asked: Callable[[], bool] = lambda: False
        """Whether a signal asked the driver to stop."""
        self._waiting: list[tuple[Callable[[str], None], IsDone]] = []

    def listen(self) -> None:
        if self.stop_asked() and not self.now.stop:
            if not self.now.begun:
                raise KeyboardInterrupt  # nothing has been computed yet
            self.now.stop = True
        if self.speed is not None:
            self.speed.observe()
        if self.room is not None and not self.now.stop:
            room = self.room()
            self.now.wanted = room if self.speed is None else self.speed.choose(room)
        for ask, answer in self.control.receive():
            try:
                self._waiting.append((answer, self._obey(ask)))
            except RequestError as error:
                answer(f"error: {error}")

    def answer(self) -> None:
        """Those who asked for something that is done now."""
        for item in list(self._waiting):
            answer, done = item
            if (text := done()) is not None:
                answer(text)
                self._waiting.remove(item)

    def _obey(self, ask: Ask) -> IsDone:
        now = self.now
        match ask:
            case Scale(workers=workers, servers=servers):
                return self._scale(now.wanted if workers is None else workers, servers)
            case Change(settings=settings):
                return self._change(settings)
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
                now.audit, now.audited = now.step % now.micro_batches, ""
                return lambda: now.audited or None
            case Dismiss(host=host):
                return self._dismiss(host)

    def _dismiss(self, host: str) -> IsDone:
        there = [w for w in self.now.workers.values() if w.at and w.at_name == host]
        told = self.withdraw(host)
        for worker in there:
            self.revoke(worker.number)
        self.now.secret = new_secret()
        self.tell(events.Hosted(host=host, what="is dropped by hand, for good"))
        return lambda: told if not any(worker.alive for worker in there) else None

    def _scale(self, workers: int, servers: int | None) -> IsDone:
        now = self.now
        if servers is not None and not now.servers:
            raise RequestError(
                "this run has no servers: its workers update the weights themselves. Stop it, and "
                "resume it with --sync server."
            )
        serving = now.servers if servers is None else servers
        if (servers is not None and servers < 1) or workers + serving > MOST_RANKS:
            raise RequestError(
                f"{workers} workers and {serving} servers: at least one of each, and no more than "
                f"{MOST_RANKS} together."
            )
        most = max((worker.most_servers for worker in now.workers.values()), default=0)
        if servers is not None and 0 < most < servers:
            raise RequestError(
                f"{servers} servers: this model's weights are shared out in {most} parts at the "
                "most, and the others would have nothing to update."
            )
        if workers < 1 or (now.most < workers and (now.merges or workers <= now.micro_batches)):
            raise RequestError(f"this run can use 1 to {now.most} workers, not {workers}.")
        if workers > now.micro_batches and not now.merges:
            raise RequestError(
                f"{workers} workers, but a step has only {now.micro_batches} micro-batches "
                "to deal out: lower train.micro_batch in a new run."
            )
        before, now.wanted, self.room, now.failed_starts = now.wanted, workers, None, 0
        now.least = min(now.least, workers)
        now.servers = now.servers if servers is None else servers
        self.want(workers + now.serving)
        scaled = events.Scaled(before=before, workers=workers, step=now.step, servers=servers)
        self.tell(scaled)
        also = f" and {now.serving} servers" * (servers is not None)

        def in_force() -> bool:
            if now.view is None or not now.running:
                return False
            hands, serving = workers + now.serving, now.serving
            return (len(now.view.members), servers_in(now.view)) == (hands, serving)

        return lambda: (
            f"{workers} worker{'s' * (workers != 1)}{also} since step {now.first_step}"
            if in_force()
            else None
        )

    def _change(self, settings: Settings) -> IsDone:
        now = self.now
        if (problem := self.objection(settings)) is not None:
            raise RequestError(problem)
        now.changes = {**now.changes, **settings}
        said = ", ".join(f"{k} = {v}" for k, v in settings.items())
        return lambda: (
            f"{said}, from step {now.first_step} on" if now.running and not now.changes else None
        )
