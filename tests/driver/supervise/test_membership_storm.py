"""Whatever happens, in whatever order: no view is ever unsafe, and in the end training goes on.

A model of processes and their messages, without processes, messages or time. Each rule is one thing
that can happen; after it the supervisor's mind is asked what to do until it says to wait.
"""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from manyhands.driver.supervise.decisions import Decision, Finish, GiveUp, HaltView, IssueView, Wait
from manyhands.driver.supervise.membership import MOST_FAILED_STARTS, decide
from manyhands.driver.supervise.worker_states import Situation, WorkerState
from manyhands.launch.engines.fork_agent import WorkerExit
from manyhands.values.messages import Left
from manyhands.values.view import View
from manyhands.values.work_in_hand import WorkInHand
from tests.support.situations import MOST_DECISIONS, apply, said, trouble

ROUNDS = 40
"""Of everything that can still happen by itself, until all must have come to rest."""

anyone = st.integers(0, 30)
"""A number that some worker is found by."""


class Storm(RuleBasedStateMachine):
    @initialize(
        wanted=st.integers(1, 4),
        least=st.integers(1, 2),
        outlives=st.booleans(),
        rounds=st.integers(0, 1),
    )
    def begin_the_run(self, wanted: int, least: int, outlives: bool, rounds: int) -> None:
        held = frozenset({""}) if outlives else frozenset[str]()
        self.now = Situation(wanted=wanted, least=min(least, wanted), held=held)
        self.health: dict[int, str] = {}
        """Of each process: well, hung (says nothing), looping (gets nothing done), dead."""
        self.codes: dict[int, int] = {}
        self.began = 0
        """The view that the members themselves have begun."""
        self.steps_done = False
        self.asked: dict[str, Any] = {}
        self.end: Decision | None = None
        self.settle()
        self.things_take_their_course(rounds=rounds)

    # ---- the supervisor

    def settle(self) -> None:
        if self.end is not None:
            return
        for _ in range(MOST_DECISIONS):
            decision = decide(self.now)
            if isinstance(decision, Wait):
                break
            if isinstance(decision, Finish | GiveUp):
                self.end = decision
                self.must_be_justified(decision)
                break
            if isinstance(decision, IssueView):
                self.must_be_safe(decision.view)
            assert not isinstance(decision, HaltView) or self.now.running
            apply(self.now, decision)
        else:
            raise AssertionError(f"it spins: {said(decide(self.now))}")
        for number, worker in self.now.workers.items():
            health = self.health.setdefault(number, "well")
            if worker.fenced is not None and health != "dead":
                self.dies(number, -9)

    def must_be_safe(self, view: View) -> None:
        now = self.now
        chosen = [now.workers[m.worker] for m in view.members]
        assert chosen and all(w.alive and w.phase in ("ready", "waiting") for w in chosen)
        for worker in now.workers.values():
            assert worker.fenced is None or worker.phase == "gone", "it could still write"
            assert worker.phase != "in", "it works in a view that is over"
        assert view.generation == (now.view.generation if now.view else 0) + 1
        assert [m.rank for m in view.members] == list(range(len(chosen)))
        heirs = [w for w in chosen if now.stop or not w.leaving]
        assert len(heirs) <= now.wanted and len(view.speeds) == len(chosen)
        survivors = [w.number for w in chosen if w.phase == "ready"]
        assert survivors == [w.number for w in chosen[: len(survivors)]]
        before = [m.worker for m in now.view.members] if now.view else []
        assert survivors == [n for n in before if n in survivors], "in their old order"
        if now.begun:
            holders = [w for w in now.workers.values() if w.alive and w.phase == "ready"]
            assert view.fresh == (not now.held and not holders)
        assert view.stop == now.stop and view.changes == now.changes

    def must_be_justified(self, end: Finish | GiveUp) -> None:
        now = self.now
        if isinstance(end, Finish):
            assert now.stop or self.steps_done
            assert all(w.left is not None for w in now.members())
        else:
            failed = now.failed_starts >= MOST_FAILED_STARTS
            dead = [n for n in self.codes if now.workers[n].phase == "gone"]
            own = [n for n in dead if self.codes[n] != -9 or now.workers[n].stuck]
            places = [now.workers[n].work for n in own]
            twice = any(p.of_user and places.count(p) > 1 for p in places)
            assert now.troubles or failed or now.losses > now.limits.losses or twice

    # ---- what workers do by themselves

    def some(self, which: int, *phases: str, health: str = "well") -> WorkerState | None:
        found = [
            w for n, w in self.now.workers.items() if w.phase in phases and self.health[n] == health
        ]
        return found[which % len(found)] if found else None

    def all_well(self) -> bool:
        """Nobody waits for a member in vain."""
        return all(self.health[w.number] == "well" for w in self.now.members())

    @rule(which=anyone)
    def says_hello(self, which: int) -> None:
        if (worker := self.some(which, "starting")) is not None:
            worker.phase, worker.phase_s = "waiting", 0.0
            self.now.failed_starts = 0
            self.settle()

    @rule()
    def the_view_begins(self) -> None:
        now = self.now
        if now.view is None or self.began == now.view.generation or not self.all_well():
            return
        if now.broken is None and all(w.phase == "in" for w in now.members()):
            self.began, now.begun, now.running = now.view.generation, True, True
            now.journal.setdefault(len(now.journal), {}).update(now.view.changes)
            now.changes = {k: v for k, v in now.changes.items() if now.view.changes.get(k) != v}
            self.settle()

    @rule()
    def a_step_is_taken(self) -> None:
        if self.now.running and self.all_well():
            self.now.losses = 0
            for worker in self.now.members():
                worker.step, worker.first = worker.step + 1, False
            self.settle()

    @rule(which=anyone)
    def leaves_the_loop(self, which: int) -> None:
        """After a Break at once; after a Halt together, so nobody may be dead or stuck."""
        now, worker = self.now, self.some(which, "in")
        halted = now.halted is not None and self.all_well() and not self.steps_done
        if worker is not None and (now.broken is not None or halted):
            worker.phase, worker.phase_s, worker.broken = "ready", 0.0, now.broken is not None
            self.settle()

    @rule(which=anyone)
    def loses_its_connection(self, which: int) -> None:
        """To one who is dead, before anybody has been seen to die."""
        if (worker := self.some(which, "in")) is not None and not self.all_well():
            worker.phase, worker.phase_s, worker.broken = "ready", 0.0, True
            self.settle()

    @rule()
    def the_last_step_is_taken(self) -> None:
        self.steps_done = self.steps_done or (self.now.running and self.all_well())

    @rule(which=anyone)
    def is_done(self, which: int) -> None:
        now, worker = self.now, self.some(which, "in")
        if worker is None or now.view is None or self.began != now.view.generation:
            return
        if now.broken is None and (self.steps_done or now.view.stop):
            worker.phase = "left"
            worker.left = Left(
                worker=worker.number, step=9, because="", peak_memory_bytes=1, loss=0.0
            )
            self.settle()

    # ---- what happens to them

    def dies(self, number: int, code: int) -> None:
        self.health[number], self.codes[number] = "dead", code

    @rule(which=anyone, code=st.sampled_from([-9, -9, -11, 0, 1]))
    def dies_of_something(self, which: int, code: int) -> None:
        if (worker := self.some(which, "starting", "waiting", "in", "ready", "left")) is not None:
            self.dies(worker.number, code)

    @rule(which=anyone)
    def is_seen_dead(self, which: int) -> None:
        phases = ("starting", "waiting", "in", "ready")
        if (worker := self.some(which, *phases, health="dead")) is not None:
            self.now.failed_starts += worker.phase == "starting"
            worker.exit = WorkerExit(worker.number, 1, self.codes[worker.number])
            worker.phase, worker.ended_s = "gone", 0.0
            self.settle()

    @rule(which=anyone, micro_batch=st.integers(0, 9))
    def users_code_fails(self, which: int, micro_batch: int) -> None:
        if (worker := self.some(which, "in")) is not None:
            worker.trouble = trouble(worker.number, step=worker.step, micro_batch=micro_batch)
            self.now.troubles.append(worker.trouble)
            self.dies(worker.number, 1)
            self.settle()

    @rule(which=anyone, index=st.integers(0, 2))
    def is_at_a_micro_batch(self, which: int, index: int) -> None:
        if (worker := self.some(which, "in")) is not None:
            worker.work = WorkInHand("compute", worker.step, index)

    @rule(which=anyone)
    def hangs(self, which: int) -> None:
        if (worker := self.some(which, "starting", "waiting", "in", "ready")) is not None:
            self.health[worker.number] = "hung"

    @rule(which=anyone)
    def loops_for_ever(self, which: int) -> None:
        if (worker := self.some(which, "in")) is not None:
            self.health[worker.number] = "looping"

    @rule()
    def time_passes(self) -> None:
        for number, worker in self.now.workers.items():
            health = self.health[number]
            worker.phase_s += 700.0 if health == "hung" else 3.0
            worker.ended_s += 3.0 if worker.exit is not None else 0.0
            worker.silent_s = 9.0 if health in ("hung", "dead") else 0.0
            worker.stuck_s = 999.0 if health != "well" else 0.0
        self.settle()

    # ---- what people ask for

    @rule(which=anyone)
    def is_told_to_go(self, which: int) -> None:
        if (worker := self.some(which, "waiting", "in", "ready")) is not None:
            worker.leaving = True
            self.settle()

    @rule(workers=st.integers(1, 4))
    def scale(self, workers: int) -> None:
        self.now.wanted, self.now.failed_starts = workers, 0
        self.now.least = min(self.now.least, workers)
        self.settle()

    @rule(key=st.sampled_from(["lr", "train.clip_norm"]), value=st.integers(1, 3))
    def change(self, key: str, value: int) -> None:
        if self.began:
            self.asked[key] = value
            self.now.changes = {**self.now.changes, key: value}
            self.settle()

    @rule(paused=st.booleans())
    def pause_or_continue(self, paused: bool) -> None:
        self.now.paused = paused
        self.settle()

    @precondition(lambda self: self.now.begun)
    @rule()
    def stop(self) -> None:
        self.now.stop = True
        self.settle()

    # ---- and then

    @invariant()
    def nothing_that_was_asked_for_is_forgotten(self) -> None:
        journalled = {k: v for made in self.now.journal.values() for k, v in made.items()}
        assert {**journalled, **self.now.changes} == self.asked

    def at_rest(self) -> bool:
        now = self.now
        if self.end is not None:
            return True
        if now.paused and not now.stop and now.view is not None:
            return not any(w.phase == "in" and w.alive for w in now.workers.values())
        if now.stop or self.steps_done:
            return False
        return now.running and self.all_well() and len(now.members()) <= now.wanted

    @rule(rounds=st.integers(1, 3))
    def things_take_their_course(self, rounds: int) -> None:
        """What must happen by itself, sooner or later."""
        for _ in range(rounds):
            self.time_passes()
            for _ in range(len(self.now.workers)):
                for happens in (self.is_seen_dead, self.says_hello, self.leaves_the_loop):
                    happens(0)
            self.the_view_begins()
            self.a_step_is_taken()
            for _ in self.now.members():
                self.is_done(0)

    @rule()
    def all_is_quiet(self) -> None:
        """When nothing else happens, what has begun comes to an end, or training goes on."""
        for _ in range(ROUNDS):
            if self.at_rest():
                return
            self.things_take_their_course(rounds=1)
        raise AssertionError(f"it never comes to rest: {self.now}")

    def teardown(self) -> None:
        self.all_is_quiet()


Storm.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestStorm = Storm.TestCase
