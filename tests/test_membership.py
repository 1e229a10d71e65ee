"""Situations and decisions: the supervisor's mind, without a supervisor."""

import pytest

from manyhands.launch.agent import Exit
from manyhands.launch.membership import (
    GRACE_S,
    Decision,
    Finish,
    GiveUp,
    IssueView,
    Situation,
    Wait,
    decide,
    first_view,
)
from manyhands.launch.messages import Left, Member, Trouble

MEMBERS = {w: Member(w, w, 100 + w, "here") for w in range(3)}
VIEW = first_view(MEMBERS)


def now(**facts: object) -> Situation:
    return Situation(wanted=3, members=dict(MEMBERS), view=VIEW, **facts)  # type: ignore[arg-type]


def left(worker: int) -> Left:
    return Left(worker=worker, step=9, because="done", peak_memory_bytes=1, loss=0.1)


def trouble(worker: int, *, symptom: bool = False, request: bool = False) -> Trouble:
    return Trouble(
        worker=worker,
        step=5,
        kind="E",
        text=f"trouble of {worker}",
        trace="",
        request=request,
        symptom=symptom,
    )


def killed(worker: int) -> Exit:
    return Exit(worker, 100 + worker, -9)


def test_the_first_view_waits_for_everyone() -> None:
    some = {0: MEMBERS[0], 2: MEMBERS[2]}
    assert decide(Situation(wanted=3, members=some)) == Wait()
    decision = decide(Situation(wanted=3, members=dict(reversed(MEMBERS.items()))))
    assert isinstance(decision, IssueView)
    assert [m.rank for m in decision.view.members] == [0, 1, 2]
    assert decision.view.generation == 1


TABLE: dict[str, tuple[Situation, type[Decision]]] = {
    "all is well": (now(), Wait),
    "some are done": (now(left={1: left(1)}, exits=[Exit(1, 101, 0)]), Wait),
    "all are done": (now(left={w: left(w) for w in range(3)}), Finish),
    "only symptoms so far": (now(troubles=[trouble(0, symptom=True)]), Wait),
    "an exit code, its reason may be on the way": (now(exits=[Exit(1, 101, 1)]), Wait),
}


@pytest.mark.parametrize("case", TABLE)
def test_situations_without_a_cause(case: str) -> None:
    situation, expected = TABLE[case]
    assert isinstance(decide(situation), expected)


BLAMED: dict[str, tuple[Situation, int, str]] = {
    "an exception": (now(troubles=[trouble(2)]), 2, "trouble of 2"),
    "a kill": (now(exits=[killed(1)]), 1, "killed by signal 9"),
    "an exception outranks its own exit": (
        now(troubles=[trouble(2)], exits=[Exit(2, 102, 1)]),
        2,
        "trouble of 2",
    ),
    "a kill outranks what others noticed first": (
        now(troubles=[trouble(0, symptom=True)], exits=[Exit(0, 100, 1), killed(1)]),
        1,
        "signal 9",
    ),
    "an exception outranks what others noticed first": (
        now(troubles=[trouble(0, symptom=True), trouble(1)]),
        1,
        "trouble of 1",
    ),
    "a symptom, when no cause turns up": (
        now(troubles=[trouble(0, symptom=True)], symptoms_for_s=GRACE_S),
        0,
        "trouble of 0",
    ),
    "an exit without a word": (
        now(exits=[Exit(1, 101, 0)], symptoms_for_s=GRACE_S),
        1,
        "exit code 0 without finishing",
    ),
    "the kernel's hand": (now(exits=[killed(0)], oom_kills=1), 0, "ran out of memory"),
}


@pytest.mark.parametrize("case", BLAMED)
def test_the_first_cause_is_blamed(case: str) -> None:
    situation, rank, says = BLAMED[case]
    decision = decide(situation)
    assert isinstance(decision, GiveUp)
    assert decision.cause.rank == rank and says in decision.cause.what
    assert not decision.cause.request


def test_a_wrong_request_stays_one() -> None:
    decision = decide(now(troubles=[trouble(0, request=True)]))
    assert isinstance(decision, GiveUp) and decision.cause.request


def test_a_worker_that_never_said_hello_can_be_blamed() -> None:
    decision = decide(Situation(wanted=2, exits=[killed(1)]))
    assert isinstance(decision, GiveUp) and decision.cause.pid == 101
