"""Hosts come and vanish, links between them fail, workers die: no view is ever unsafe, and in the
end training goes on with whoever is there. A model, as in test_membership_storm.py."""

from collections import Counter
from dataclasses import dataclass
from itertools import groupby

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from manyhands.driver.supervise.decisions import (
    DropHost,
    Finish,
    GiveUp,
    IssueView,
    StartWorkers,
    Wait,
)
from manyhands.driver.supervise.membership import decide
from manyhands.driver.supervise.worker_states import Limits, Situation, WorkerState
from manyhands.launch.engines.fork_agent import WorkerExit
from manyhands.values.view import View
from tests.support.situations import MOST_DECISIONS, apply, said

ROUNDS = 40
some = st.integers(0, 30)
"""A number by which a worker or a host is found."""


@dataclass
class Host:
    slots: int
    alive: bool = True
    dropped: bool = False
    holds: bool = False
    """There is state in its memory."""


class Storm(RuleBasedStateMachine):
    @initialize(wanted=st.integers(1, 5), here=st.integers(0, 2), hosts=st.integers(0, 3))
    def begin_the_run(self, wanted: int, here: int, hosts: int) -> None:
        self.now = Situation(wanted=wanted, limits=Limits(losses=1000))
        self.hosts = {"": Host(here)}
        self.count = 0
        self.cut: set[frozenset[str]] = set()
        """Links that carry nothing."""
        self.dead: set[int] = set()
        """Workers who have died, seen or not."""
        self.at: dict[int, str] = {}
        """Where the slot is that a worker takes."""
        self.began = 0
        for _ in range(hosts):
            self.a_host_comes(2)
        self.things_take_their_course(2)

    # ---- the supervisor

    def settle(self) -> None:
        now = self.now
        present = [h for h in self.hosts.values() if h.alive and not h.dropped]
        now.capacity = sum(host.slots for host in present)
        for worker in now.workers.values():
            host = self.hosts[worker.at]
            worker.host_silent_s = 0.0 if host.alive else 99.0
        taken: list[str] = []
        while not isinstance(decision := decide(now), Wait):
            taken.append(said(decision))
            assert len(taken) < MOST_DECISIONS, f"it spins: {taken[-4:]}"
            assert not isinstance(decision, Finish | GiveUp), taken
            if isinstance(decision, IssueView):
                self.must_be_safe(decision.view)
            if isinstance(decision, StartWorkers):
                assert now.capacity, "nobody could start it"
            if isinstance(decision, DropHost):
                assert decision.at, "the driver's host stays"
                self.hosts[decision.at].dropped = True
            apply(now, decision)
            if isinstance(decision, StartWorkers):
                self.place()
        for worker in now.workers.values():
            if worker.fenced is not None:
                self.dead.add(worker.number)

    def place(self) -> None:
        """As `JoinedHosts.place` does."""
        for worker in self.now.workers.values():
            if worker.number in self.at:
                continue
            taken = Counter(self.at.values())
            free = {
                at: 1 - taken[at] / host.slots
                for at, host in self.hosts.items()
                if host.slots and host.alive and not host.dropped
            }
            worker.at = max(free, key=lambda at: free[at])
            self.at[worker.number] = worker.at

    def must_be_safe(self, view: View) -> None:
        now = self.now
        chosen = [now.workers[m.worker] for m in view.members]
        assert chosen and all(w.alive and w.phase in ("ready", "waiting") for w in chosen)
        for worker in now.workers.values():
            assert worker.fenced is None or worker.phase == "gone", "it could still write"
            assert worker.phase != "in", "it works in a view that is over"
        for worker in chosen:
            assert not self.hosts[worker.at].dropped, "it was given up"
        homes = [(at, len(list(group))) for at, group in groupby(chosen, key=lambda w: w.at)]
        assert len({at for at, _ in homes}) == len(homes), "ranks of a host are not neighbours"
        assert [size for _, size in homes] == view.hosts and len(view.peer_addresses) == len(homes)
        assert [m.rank for m in view.members] == list(range(len(chosen)))
        assert len([w for w in chosen if not w.leaving]) <= now.wanted
        holders = [at for at, _ in homes if self.hosts[at].holds]
        assert view.fresh == (not now.begun or not holders)
        if view.fresh and now.begun:
            living = [w for w in now.workers.values() if w.alive]
            assert not any(self.hosts[w.at].holds for w in living), "its state would be lost"
            assert all(w.phase == "waiting" for w in chosen), "it is not as it was built"

    # ---- what workers do by themselves

    def one(self, which: int, *phases: str) -> WorkerState | None:
        """That lives, on a host that does."""
        found = [
            w
            for w in self.now.workers.values()
            if w.phase in phases and w.number not in self.dead and self.hosts[w.at].alive
        ]
        return found[which % len(found)] if found else None

    def members(self) -> list[WorkerState]:
        return self.now.members()

    def all_well(self) -> bool:
        ats = {w.at for w in self.members()}
        lost = [link for link in self.cut if link <= ats]
        living = all(self.hosts[w.at].alive and w.number not in self.dead for w in self.members())
        return living and not lost

    @rule(which=some)
    def says_hello(self, which: int) -> None:
        if (worker := self.one(which, "starting")) is not None:
            worker.phase, worker.phase_s, worker.pid = "waiting", 0.0, 100 + worker.number
            worker.peer_address = f"door of {worker.number}"
            self.now.failed_starts = 0
            self.settle()

    @rule()
    def the_view_begins(self) -> None:
        now = self.now
        if now.view is None or self.began == now.view.generation or not self.all_well():
            return
        if now.broken is None and all(w.phase == "in" for w in now.members()):
            self.began, now.begun, now.running = now.view.generation, True, True
            now.held = frozenset(w.at for w in now.members())
            for at, host in self.hosts.items():
                host.holds = at in now.held  # what others keep is of an older step, and not used
            self.settle()

    @rule()
    def a_step_is_taken(self) -> None:
        if self.now.running and self.all_well():
            self.now.losses = 0
            for worker in self.members():
                worker.step, worker.first = worker.step + 1, False
            self.settle()

    @rule(which=some)
    def a_host_takes_over_and_has_not_all_of_it(self, which: int) -> None:
        """Its state was behind another's, and is void from the first byte that it receives."""
        now = self.now
        if now.view is None or self.began == now.view.generation or not now.begun:
            return
        ats = sorted({w.at for w in self.members() if w.phase == "in" and self.hosts[w.at].alive})
        holders = [at for at in ats if self.hosts[at].holds]
        others = [at for at in ats if holders and at != holders[0]]
        if others:
            self.hosts[others[which % len(others)]].holds = False

    @rule(which=some)
    def leaves_the_loop(self, which: int) -> None:
        now, worker = self.now, self.one(which, "in")
        halted = now.halted is not None and self.all_well() and self.began_all()
        if worker is not None and (now.broken is not None or halted):
            self.is_ready(worker, broken=now.broken is not None)

    def began_all(self) -> bool:
        return self.now.view is not None and self.began == self.now.view.generation

    @rule(which=some)
    def loses_a_connection(self, which: int) -> None:
        """Who speaks for its host."""
        firsts = {w.at: w for w in reversed(self.members())}
        spoken = [
            (worker, frozenset(other for other in firsts if self.unreachable(at, other)))
            for at, worker in firsts.items()
            if worker.phase == "in" and worker.number not in self.dead and self.hosts[at].alive
        ]
        spoken = [(worker, lost) for worker, lost in spoken if lost]
        if spoken:
            worker, lost = spoken[which % len(spoken)]
            worker.lost = lost
            self.is_ready(worker, broken=True)

    def unreachable(self, at: str, other: str) -> bool:
        leader = next(w for w in self.members() if w.at == other)
        gone = leader.number in self.dead or not self.hosts[other].alive
        return at != other and (gone or frozenset((at, other)) in self.cut)

    def is_ready(self, worker: WorkerState, *, broken: bool) -> None:
        """As `Supervisor._hear` notes it."""
        now = self.now
        worker.phase, worker.phase_s, worker.broken = "ready", 0.0, broken
        worker.held = self.hosts[worker.at].holds
        now.begun = now.begun or worker.held
        if not worker.held:
            now.held -= {worker.at}
        self.settle()

    # ---- what happens to them

    @rule(which=some)
    def dies(self, which: int) -> None:
        if (worker := self.one(which, "starting", "waiting", "in", "ready")) is not None:
            self.dead.add(worker.number)

    @rule()
    def the_dead_are_seen(self) -> None:
        for worker in list(self.now.workers.values()):
            seen = worker.phase in ("gone", "left") or worker.number not in self.dead
            if not seen and self.hosts[worker.at].alive and not self.hosts[worker.at].dropped:
                self.ended(worker, "")
                self.settle()

    def ended(self, worker: WorkerState, lost: str) -> None:
        worker.exit = WorkerExit(worker.number, 1, -9, lost=lost)
        worker.phase, worker.ended_s = "gone", 0.0
        self.at[worker.number] = "nowhere"
        if lost:
            self.now.held -= {worker.at}

    @rule(slots=st.integers(1, 2))
    def a_host_comes(self, slots: int) -> None:
        self.count += 1
        if len([h for h in self.hosts.values() if h.alive]) < 5:
            self.hosts[f"host {self.count}"] = Host(slots)
            self.settle()

    @rule(which=some)
    def a_host_vanishes(self, which: int) -> None:
        found = [host for at, host in self.hosts.items() if at and host.alive]
        if found:
            found[which % len(found)].alive = False

    @rule(which=some)
    def a_link_fails(self, which: int) -> None:
        ats = [at for at, host in self.hosts.items() if host.alive]
        pairs = [frozenset((a, b)) for k, a in enumerate(ats) for b in ats[:k]]
        if pairs:
            self.cut.add(pairs[which % len(pairs)])

    @rule()
    def links_heal(self) -> None:
        self.cut.clear()

    @rule()
    def silent_hosts_are_given_up(self) -> None:
        for at, host in list(self.hosts.items()):
            if host.alive and not host.dropped:
                continue
            host.holds, host.alive, host.dropped = False, False, True
            for worker in list(self.now.workers.values()):
                if worker.at == at and worker.phase not in ("gone", "left"):
                    self.dead.add(worker.number)
                    self.ended(worker, "its host is gone")
        self.settle()

    @rule()
    def time_passes(self) -> None:
        for worker in self.now.workers.values():
            worker.phase_s += 3.0
            worker.ended_s += 3.0 if worker.exit is not None else 0.0
        self.settle()

    @rule(workers=st.integers(1, 5))
    def scale(self, workers: int) -> None:
        self.now.wanted = workers
        self.settle()

    @rule(which=some)
    def is_told_to_go(self, which: int) -> None:
        if (worker := self.one(which, "waiting", "in", "ready")) is not None:
            worker.leaving = True
            self.settle()

    # ---- and then

    @rule(rounds=st.integers(1, 2))
    def things_take_their_course(self, rounds: int) -> None:
        for _ in range(rounds):
            self.time_passes()
            self.the_dead_are_seen()
            self.silent_hosts_are_given_up()
            for _ in range(len(self.now.workers)):
                self.says_hello(0)
                self.leaves_the_loop(0)
            self.loses_a_connection(0)
            self.the_view_begins()
            self.a_step_is_taken()

    def teardown(self) -> None:
        """Whatever was: with one host more, training goes on."""
        self.a_host_comes(1)
        for _ in range(ROUNDS):
            self.things_take_their_course(1)
            members = self.members()
            if self.now.running and members and self.all_well():
                assert all(self.hosts[w.at].alive for w in members)
                return
        raise AssertionError(f"it never comes to rest: {self.now}")


Storm.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestStormOfHosts = Storm.TestCase
