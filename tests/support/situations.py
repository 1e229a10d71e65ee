"""Situations in one line each, and a supervisor's hands without a supervisor."""

from collections.abc import Callable
from typing import Any

from manyhands.driver.supervise.decisions import (
    BreakView,
    Decision,
    DropHost,
    Fence,
    Finish,
    GiveUp,
    HaltView,
    IssueView,
    StartWorkers,
    Wait,
)
from manyhands.driver.supervise.membership import decide
from manyhands.driver.supervise.uneven_deal import redealt
from manyhands.driver.supervise.worker_states import Phase, Situation, WorkerState
from manyhands.launch.engines.fork_agent import WorkerExit
from manyhands.values.messages import Left, Trouble
from manyhands.values.view import Member, View
from manyhands.values.work_in_hand import WorkInHand

Place = Callable[[int], WorkerState]
"""A worker, but for its number."""

MOST_DECISIONS = 25
"""In a row, without anything having happened: more would be spinning."""


def w(phase: Phase, **facts: Any) -> Place:
    return lambda number: WorkerState(number, phase, pid=100 + number, host="here", **facts)


STARTING, WAITING, IN, READY = w("starting"), w("waiting"), w("in"), w("ready")


def killed(signal: int = 9, **facts: Any) -> Place:
    return lambda n: w("gone", exit=WorkerExit(n, 100 + n, -signal), ended_s=0.1, **facts)(n)


def ended(code: int, ago: float, **facts: Any) -> Place:
    return lambda n: w("gone", exit=WorkerExit(n, 100 + n, code), ended_s=ago, **facts)(n)


def starved(work: WorkInHand) -> Place:
    """Killed by the kernel for want of memory."""

    def place(n: int) -> WorkerState:
        exit = WorkerExit(n, 100 + n, -9, out_of_memory=True)
        return w("gone", exit=exit, ended_s=0.1, work=work)(n)

    return place


def gone_with(at: str, work: WorkInHand) -> Place:
    """Its host is silent."""

    def place(n: int) -> WorkerState:
        exit = WorkerExit(n, 100 + n, -9, lost=f"host {at} is silent")
        facts: dict[str, Any] = {"at": at, "at_name": f"name of {at}", "work": work}
        return w("gone", exit=exit, ended_s=0.1, **facts)(n)

    return place


def done(number: int) -> WorkerState:
    last = Left(worker=number, step=9, because="done", peak_memory_bytes=1, loss=0.1)
    return w("left", left=last)(number)


def trouble(worker: int, **facts: Any) -> Trouble:
    text = f"trouble of {worker}"
    said: dict[str, Any] = {"step": 5, "kind": "E", "text": text, "trace": "", "request": False}
    return Trouble(worker=worker, **said | facts)


def view(*numbers: int, **facts: Any) -> View:
    members = [Member(n, rank, 100 + n, "here") for rank, n in enumerate(numbers)]
    facts = {"generation": 1, "speeds": [1.0] * len(numbers), "because": "", **facts}
    return View(members=members, **facts)


def now(*places: Place, of: tuple[int, ...] | View | None = None, **facts: Any) -> Situation:
    """Workers 0, 1, ...; `of`: who is in the view (left out: all who have got that far)."""
    workers = {number: place(number) for number, place in enumerate(places)}
    if of is None:
        of = tuple(n for n, x in workers.items() if x.phase not in ("starting", "waiting"))
    current = of if isinstance(of, View) else view(*of) if of else None
    quiet = not facts.get("broken") and not facts.get("halted")
    begun = {"begun": current is not None, "running": current is not None and quiet}
    facts = {"wanted": 3, "held": frozenset({""}), **begun, **facts}
    return Situation(workers=workers, view=current, **facts)


def apply(now: Situation, decision: Decision) -> None:
    """What `Supervisor._do` does to the situation."""
    match decision:
        case StartWorkers(count=count):
            first = len(now.workers)
            for number in range(first, first + count):
                now.workers[number] = STARTING(number)
        case Fence(worker=worker, because=because, stuck=stuck):
            now.workers[worker].fenced, now.workers[worker].stuck = because, stuck
        case DropHost(at=at, because=because):
            for member in now.workers.values():
                if member.at == at and member.alive:
                    member.fenced = because
        case BreakView(because=because, cause=cause):
            now.broken, now.running = because, False
            now.losses += cause is not None
        case HaltView(because=because, speeds=speeds):
            now.redealt = redealt(now) if speeds else now.redealt
            now.halted, now.running, now.better = because, False, speeds
            now.halts += 1
        case IssueView(view=issued):
            for worker in now.workers.values():
                if worker.alive and worker.phase in ("ready", "waiting"):
                    worker.phase = "left" if issued.rank_of(worker.number) is None else "in"
                    worker.broken, worker.lost, worker.phase_s = False, frozenset(), 0.0
            now.view, now.running = issued, False
            now.broken = now.halted = now.audit = None
            now.better = ()
        case _:
            raise AssertionError(decision)


def decisions(now: Situation) -> list[Decision]:
    """All that are taken until there is nothing more to do; the situation is then another."""
    taken: list[Decision] = []
    while not isinstance(decision := decide(now), Wait):
        taken.append(decision)
        if isinstance(decision, Finish | GiveUp):
            break
        assert len(taken) < MOST_DECISIONS, f"it spins: {[said(d) for d in taken[-4:]]}"
        apply(now, decision)
    return taken


def said(decision: Decision) -> str:
    match decision:
        case StartWorkers(count=count):
            return f"start {count}"
        case Fence(worker=worker, because=because):
            return f"fence {worker}: {because}"
        case DropHost(at=at, because=because):
            return f"drop {at}: {because}"
        case BreakView(because=because):
            return f"break: {because}"
        case HaltView(because=because):
            return f"halt: {because}"
        case IssueView(view=issued):
            who = ", ".join(str(m.worker) for m in issued.members)
            fresh = f" fresh from {issued.restore}" if issued.fresh else ""
            ends = " and ends" if issued.stop else ""
            return f"view {issued.generation} of {who}{fresh}{ends}: {issued.because}"
        case Finish(leader=leader):
            return f"finish as {leader.worker} did"
        case GiveUp(cause=cause):
            return f"give up on {cause.worker}: {cause.what}"
        case Wait():
            return "wait"
