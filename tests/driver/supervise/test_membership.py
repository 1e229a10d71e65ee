"""Situations and decisions: the supervisor's mind, without a supervisor."""

from copy import deepcopy
from typing import Any

import pytest

from manyhands.driver.supervise.audit import judge
from manyhands.driver.supervise.death_causes import GRACE_S
from manyhands.driver.supervise.decisions import BreakView, GiveUp, HaltView, IssueView
from manyhands.driver.supervise.membership import decide, suspicious
from manyhands.driver.supervise.uneven_deal import UNEVEN, patience_s, redealt
from manyhands.driver.supervise.worker_states import Situation, WorkerState
from manyhands.launch.engines.fork_agent import WorkerExit
from manyhands.values.verdict import Cause
from manyhands.values.view import View
from manyhands.values.work_in_hand import WorkInHand
from tests.support.situations import (
    IN,
    READY,
    STARTING,
    WAITING,
    Place,
    apply,
    decisions,
    done,
    ended,
    gone_with,
    killed,
    now,
    said,
    starved,
    trouble,
    view,
    w,
)

BROKEN, KILLED = "rank 1 is gone: it was killed", "it was killed by signal 9 (SIGKILL)"
GONE, FENCED = killed(), w("in", fenced="it has not been heard of")
SILENT, STUCK = (
    w("in", silent_s=3.1),
    w("in", stuck_s=31.0, first=False, work=WorkInHand("compute", 5, 3)),
)
AT_4, AT_5 = WorkInHand("compute", 5, 4), WorkInHand("compute", 5, 5)
LOOPED = killed(fenced="it has made no progress", stuck=True, work=AT_4)
SCORING = WorkInHand("evaluate", 5, 1)
LEAVING, GOING, SPARE = w("in", leaving=True), w("ready", leaving=True), w("waiting", phase_s=9.0)
SYMPTOM, ALONE = w("ready", broken=True), w("ready", broken=True, phase_s=GRACE_S)
FAST, SLOW = w("in", micro_batch_s=0.1), w("in", micro_batch_s=0.3)
FAILED_1, FAILED_2 = trouble(1, micro_batch=4, records=[7, 8]), trouble(2, micro_batch=4)
FAILED = w("gone", trouble=FAILED_1)
# On hosts a, b and c: connections have failed, though both live, or one is mute since then.
CUT_NOW = w("ready", broken=True, lost=frozenset("b"), at="a", at_name="a")
CUT = w("ready", broken=True, lost=frozenset("b"), at="a", at_name="a", phase_s=1.0)
HALF, MUTE = w("in", at="b", at_name="b"), w("in", at="b", at_name="b", host_silent_s=1.5)
LOST = w("ready", broken=True, lost=frozenset("ab"), at="c", at_name="c", phase_s=1.0)
LATE = w("ready", broken=True, held=False, at="a")
HOSTS: dict[str, Any] = {"capacity": 3}
BEREFT: dict[str, Any] = {**HOSTS, "held": frozenset[str](), "broken": BROKEN}
HELD_BY_B: dict[str, Any] = {"held": frozenset("b")}
LONG: dict[str, Any] = {"micro_batches": 12, "measured_s": 9.0}

# fmt: off
# What is the case, and everything that is then decided until there is nothing left but to wait.
TABLE: list[tuple[str, Situation, list[str]]] = [
    # ---- the beginning
    ("nobody is there", now(), ["start 3"]),
    ("they are coming up", now(STARTING, STARTING, STARTING), []),
    ("the first view waits for everyone", now(WAITING, STARTING, WAITING), []),
    ("all are here", now(WAITING, WAITING, WAITING), ["view 1 of 0, 1, 2 fresh from None: all 3"]),
    ("... and resume", now(WAITING, wanted=1, restore=40),
     ["view 1 of 0 fresh from 40: the worke"]),
    ("one did not come up", now(WAITING, GONE, WAITING, of=()), ["start 1"]),
    ("all is well", now(IN, IN, IN), []),
    # ---- losses
    ("one is killed", now(IN, GONE, IN), ["start 1", f"break: rank 1 is gone: {KILLED}"]),
    ("others are still working", now(IN, GONE, READY, STARTING, broken=BROKEN), []),
    ("its replacement is not waited for", now(READY, GONE, READY, STARTING, broken=BROKEN),
     ["view 2 of 0, 2: rank 1 is gone"]),
    ("survivors keep their order", now(WAITING, READY, GONE, READY, of=(3, 2, 1), broken=BROKEN),
     ["view 2 of 3, 1, 0: rank 1 is gone"]),
    ("fewer than wanted go on", now(READY, GONE, broken=BROKEN, failed_starts=3), ["view 2 of 0"]),
    ("... but not with those who go", now(GOING, GONE, broken=BROKEN, failed_starts=3),
     [f"give up on 1: {KILLED}"]),
    ("too few wait", now(READY, GONE, READY, STARTING, broken=BROKEN, least=3), []),
    ("one dies while others halt", now(READY, GONE, IN, STARTING, halted="-"), ["break: rank 1"]),
    ("a second dies in a recovery", now(READY, GONE, GONE, broken=BROKEN),
     ["start 2", "view 2 of 0"]),
    ("a newcomer dies", now(IN, IN, IN, GONE, of=(0, 1, 2)), []),
    ("an exit may still be explained", now(IN, ended(1, ago=0.1), IN, STARTING), []),
    ("... or not", now(IN, ended(0, ago=GRACE_S), IN, STARTING),
     ["break: rank 1 is gone: it ended with exit code 0"]),
    ("only a symptom so far", now(IN, SYMPTOM, IN), []),
    ("... and nothing else comes", now(IN, ALONE, IN), ["break: worker 1 lost"]),
    ("a symptom, then its cause", now(GONE, SYMPTOM, SYMPTOM, STARTING),
     ["break: rank 0 is gone", "view 2 of 1, 2"]),
    # ---- nobody survived
    ("all are killed", now(GONE, GONE, GONE), ["start 3", "break: rank 0 is gone"]),
    ("newcomers are waited for", now(GONE, GONE, WAITING, STARTING, wanted=2, broken=BROKEN), []),
    ("state has outlived them", now(GONE, WAITING, wanted=1, broken=BROKEN), ["view 2 of 1: rank"]),
    ("state has gone too", now(GONE, WAITING, wanted=1, broken="-", held=frozenset(), restore=40),
     ["view 2 of 1 fresh from 40: -"]),
    ("... but not with all of them", now(GONE, READY, wanted=1, broken=BROKEN, held=frozenset()),
     ["view 2 of 1: rank"]),
    ("it had not begun", now(GONE, WAITING, wanted=1, broken=BROKEN, begun=False),
     ["view 2 of 1 fresh from None"]),
    # ---- fencing
    ("one is silent", now(IN, SILENT, IN),
     ["fence 1: it has not been heard of for 3.1 s", "start 1"]),
    ("one is stuck", now(IN, IN, STUCK),
     ["fence 2: it has made no progress for 31.0 s", "start 1"]),
    ("one computes wrongly", now(IN, w("in", wrong="an audit"), IN),
     ["fence 1: an audit", "start 1"]),
    ("one does not come up", now(w("starting", phase_s=601)),
     ["fence 0: it has not come up in 600 s", "start 3"]),
    ("a newcomer is silent", now(IN, IN, w("waiting", silent_s=4.0)),
     ["fence 2: it has not", "start 1"]),
    ("importing is silent too", now(IN, IN, w("starting", silent_s=99.0, phase_s=99.0)), []),
    ("its first step may take long", now(IN, w("in", stuck_s=599.0), IN), []),
    ("... but not for ever", now(IN, w("in", stuck_s=601.0, work=AT_4), IN),
     ["fence 1: it has made no progress for 601.0 s, though it lives (recovery.starting_s = 600)",
      "start 1"]),
    ("taking a place is never routine",
     now(IN, w("in", stuck_s=99.0, first=False, work=WorkInHand("join")), IN), []),
    ("whoever waits is not stuck", now(w("ready", stuck_s=99.0, first=False), IN, IN, halted="-"),
     []),
    ("slow micro-batches",
     now(IN, w("in", stuck_s=99.0, first=False, micro_batch_s=10.0, work=AT_4), IN), []),
    ("scoring takes longer", now(IN, w("in", stuck_s=299.0, first=False, work=SCORING), IN), []),
    ("... the first time, still longer", now(IN, w("in", stuck_s=599.0, work=SCORING), IN), []),
    ("... and not for ever", now(IN, w("in", stuck_s=301.0, first=False, work=SCORING), IN),
     ["fence 1: it has made no progress for 301.0 s, though it lives (recovery.evaluate_s = 300)",
      "start 1"]),
    ("threads cannot be fenced", now(SILENT, wanted=1, replaceable=False), []),
    ("fenced, but not yet dead", now(IN, FENCED, IN, STARTING), []),
    ("... it could still write", now(READY, FENCED, READY, WAITING, broken=BROKEN), []),
    ("... and now it is", now(IN, killed(fenced="it was silent"), IN, STARTING),
     ["break: rank 1 is gone: it was silent"]),
    # ---- what trying again would not cure
    ("user code fails", now(IN, IN, IN, troubles=[FAILED_1]), []),
    ("... and its worker ends", now(IN, FAILED, IN, troubles=[FAILED_1]),
     ["start 1", "break: rank 1 is gone: trouble of 1"]),
    ("... and again, elsewhere", now(IN, FAILED, IN, troubles=[FAILED_1, FAILED_2]),
     ["give up on 2: trouble of 2"]),
    ("two places fail", now(IN, IN, IN, troubles=[FAILED_1, trouble(2, micro_batch=5)]), []),
    ("between micro-batches", now(IN, IN, IN, troubles=[trouble(1)]),
     ["give up on 1: trouble of 1"]),
    ("our own error", now(IN, IN, troubles=[trouble(1, ours=True, micro_batch=4)]),
     ["give up on 1"]),
    ("a wrong request", now(IN, IN, troubles=[trouble(0, request=True)]), ["give up on 0"]),
    ("it fails while it builds", now(STARTING, troubles=[trouble(0)]),
     ["give up on 0: trouble of 0"]),
    ("a newcomer fails to build", now(IN, IN, STARTING, troubles=[trouble(2)]), []),
    ("... and another", now(IN, IN, STARTING, troubles=[trouble(2), trouble(3)]), []),
    ("what another will explain", now(IN, IN, IN, troubles=[trouble(1, symptom=True, ours=True)]),
     []),
    # ---- ends without a word, at the same place
    ("one crashes", now(IN, killed(11, work=AT_4), IN, STARTING), ["break: rank 1 is gone"]),
    ("... and another, there", now(IN, killed(11, work=AT_4), killed(7, work=AT_4), STARTING),
     ["give up on 2: it was killed by signal 7"]),
    ("... elsewhere", now(IN, killed(11, work=AT_4), killed(11, work=AT_5), STARTING, STARTING),
     ["break: rank 1 is gone"]),
    ("... in another step",
     now(IN, killed(11, work=AT_4), killed(6, work=WorkInHand("compute", 6, 4)), STARTING,
         STARTING), ["break: rank 1 is gone"]),
    ("... while it built", now(IN, killed(11), killed(11), STARTING, STARTING), ["break: rank 1"]),
    ("killed from outside, at the same place",
     now(IN, killed(9, work=AT_4), killed(15, work=AT_4), STARTING, STARTING), ["break: rank 1"]),
    ("... with its host", now(IN, gone_with("a", AT_4), gone_with("b", AT_4), STARTING, STARTING),
     ["break: host name of a is gone with rank 1: host a is silent"]),
    ("... for want of memory",
     now(IN, starved(AT_4), starved(AT_4), STARTING), ["give up on 2: it was killed by signal 9"]),
    ("one exits at a place where another crashed",
     now(IN, killed(11, work=AT_4), ended(3, ago=9.0, work=AT_4), STARTING), ["give up on 1"]),
    ("... its last words may come",
     now(IN, killed(11, work=AT_4), ended(3, ago=0.1, work=AT_4), STARTING, STARTING),
     ["break: rank 1"]),
    ("one loops where another failed", now(IN, LOOPED, IN, STARTING, troubles=[FAILED_2]),
     ["give up on 2: trouble of 2"]),
    ("two loop", now(IN, LOOPED, LOOPED, STARTING), ["give up on 2: it has made no progress"]),
    ("two are silent there",
     now(IN, killed(fenced="-", work=AT_4), killed(fenced="-", work=AT_4), STARTING, STARTING),
     ["break: rank 1"]),
    ("a thread fails", now(IN, wanted=1, replaceable=False, troubles=[trouble(0, micro_batch=4)]),
     ["give up on 0"]),
    ("a thread ends", now(ended(1, ago=9.0), wanted=1, replaceable=False),
     ["give up on 0: it ended with exit"]),
    ("... its last words may come", now(ended(0, ago=0.1), wanted=1, replaceable=False), []),
    ("losses without a step", now(IN, GONE, IN, STARTING, losses=6),
     ["give up on 1: it was killed"]),
    ("... one more", now(IN, GONE, IN, STARTING, losses=5), ["break: rank 1", "give up on 1"]),
    ("... as many as may be", now(IN, GONE, IN, STARTING, losses=4), ["break: rank 1 is gone"]),
    ("nobody ever came up", now(GONE, GONE, GONE, of=(), failed_starts=3), ["give up on 0"]),
    ("no more come up", now(IN, GONE, of=(0,), failed_starts=3), []),
    ("... and the last one dies", now(GONE, GONE, of=(0,), failed_starts=3), ["give up on 0"]),
    ("... but it was done before", now(done, GONE, of=(0,), failed_starts=3), ["finish as 0 did"]),
    # ---- hosts
    ("two hosts have lost each other", now(IN, CUT, HALF, **HOSTS),
     ["drop b: a and b both answer, but do", "start 1"]),
    ("... and one does not answer since", now(IN, CUT, MUTE, **HOSTS),
     ["drop b: b does not answer, and its", "start 1"]),
    ("... but that was just now", now(IN, CUT_NOW, HALF, **HOSTS), []),
    ("one cannot reach anybody", now(w("in", at="a", at_name="a"), HALF, LOST, **HOSTS),
     ["drop c: a and c both answer", "start 1"]),
    ("a newcomer is left without the state", now(LATE, killed(at="b"), of=(0, 1), **BEREFT),
     ["start 2", "fence 0: nobody holds the state", "start 1"]),
    ("... but it is in the memory of a host whose next worker comes",
     now(LATE, killed(at="b"), w("starting", at="b"), of=(0, 1), **BEREFT | HELD_BY_B),
     ["start 1"]),
    # ---- joining and leaving
    ("a worker joins", now(IN, IN, SPARE), ["halt: worker 2 joins"]),
    ("two workers join", now(IN, SPARE, SPARE), ["halt: workers 1, 2 join"]),
    ("it waits for one who is coming", now(IN, w("waiting", phase_s=0.4), STARTING), []),
    ("... but not for long", now(IN, w("waiting", phase_s=0.6), STARTING),
     ["halt: worker 1 joins"]),
    ("it is in", now(READY, READY, WAITING, halted="worker 2 joins"),
     ["view 2 of 0, 1, 2: worker 2 joins"]),
    ("it died before", now(READY, READY, GONE, STARTING, of=(0, 1), halted="-"),
     ["view 2 of 0, 1"]),
    ("there is no place for it", now(IN, IN, IN, SPARE), []),
    ("one is told to go", now(IN, LEAVING, IN), ["start 1", "halt: worker 1 was told to go"]),
    ("it goes", now(READY, GOING, READY, WAITING, halted="-"), ["view 2 of 0, 2, 3: -"]),
    ("the only one goes", now(GOING, STARTING, halted="-", wanted=1), []),
    ("... when another is there", now(GOING, WAITING, halted="-", wanted=1), ["view 2 of 1: -"]),
    ("... and holds all there is", now(GOING, WAITING, halted="-", wanted=1, held=frozenset()),
     ["view 2 of 0, 1: -"]),
    ("fewer are wanted", now(IN, IN, IN, wanted=2), ["halt: 2 workers are wanted"]),
    ("... and fewer remain", now(READY, READY, READY, wanted=2, halted="-"), ["view 2 of 0, 1: -"]),
    ("more are wanted", now(IN, IN, IN, wanted=5), ["start 2"]),
    # ---- what people ask for
    ("a setting changes", now(IN, IN, IN, changes={"lr": 0.1}),
     ["halt: settings change: lr = 0.1"]),
    ("... when the view begins", now(IN, IN, IN, changes={"lr": 0.1}, running=False), []),
    ("a stop", now(IN, IN, IN, stop=True), ["halt: a stop was asked for"]),
    ("... nobody is replaced any more", now(IN, GONE, IN, stop=True), ["break: rank 1 is gone"]),
    ("... it ends", now(READY, READY, READY, stop=True, halted="-"),
     ["view 2 of 0, 1, 2 and ends: -"]),
    ("... it is ending", now(IN, IN, IN, of=view(0, 1, 2, stop=True), stop=True), []),
    ("... nobody is there to end it", now(GONE, stop=True, wanted=1), ["start 1", "break: rank 0"]),
    ("... all were told to go", now(GOING, stop=True, wanted=1, halted="-"),
     ["view 2 of 0 and ends: -"]),
    ("a pause", now(IN, IN, IN, paused=True), ["halt: a pause was asked for"]),
    ("... it is paused", now(READY, READY, READY, paused=True, halted="-"), []),
    ("... and goes on", now(READY, READY, READY, halted="-"), ["view 2 of 0, 1, 2: -"]),
    ("... one dies in it", now(READY, GONE, READY, paused=True, halted="-"),
     ["start 1", "break: rank 1"]),
    ("... and is stopped", now(READY, READY, READY, paused=True, stop=True, halted="-"),
     ["view 2 of 0, 1, 2 and"]),
    ("an audit", now(IN, IN, IN, audit=4), ["halt: an audit was asked for"]),
    ("a third opinion", now(READY, READY, audit=4, witnesses=1, wanted=2, halted="-"), ["start 1"]),
    # ---- dealing
    ("one is slow", now(FAST, SLOW, FAST, **LONG), [f"halt: {UNEVEN}"]),
    ("... too early to tell", now(FAST, SLOW, FAST, micro_batches=12, measured_s=1.0), []),
    ("... or it is not to matter", now(FAST, SLOW, FAST, **LONG, rebalance=False), []),
    ("... and one is not measured", now(FAST, SLOW, IN, **LONG), []),
    ("... as after every deal", now(FAST, SLOW, FAST, **LONG, redealt=((0, 1, 2), 3)), []),
    ("... who were others", now(FAST, SLOW, FAST, **LONG, redealt=((0, 1, 3), 3)),
     [f"halt: {UNEVEN}"]),
    ("... and is dealt less", now(FAST, SLOW, of=view(0, 1, speeds=[1.0, 0.35]), wanted=2, **LONG),
     []),
    # ---- the end
    ("one is done", now(done, IN, IN), []),
    ("all are done", now(done, done, done), ["finish as 0 did"]),
    ("some ends are read before last words", now(done, ended(0, 0.1), ended(0, 0.2)), []),
    ("... the end of all", now(ended(0, 0.1), ended(0, 0.1), ended(0, 0.2)), []),
    ("... and there were none", now(done, ended(0, 9.0), ended(0, 9.0)),
     ["start 1", "break: rank 1"]),
    ("one joins too late", now(done, IN, SPARE), []),
    ("one is killed while others work", now(done, GONE, IN), ["break: rank 1 is gone"]),
    ("... the others finish it", now(done, GONE, READY, broken=BROKEN), ["view 2 of 2: rank 1"]),
    ("... no others are left", now(done, GONE, done), ["start 1", "break: rank 1 is gone"]),
    ("... one comes", now(done, GONE, done, WAITING, broken=BROKEN), ["view 2 of 3: rank 1"]),
]
# fmt: on


CASES = [pytest.param(situation, expected, id=case) for case, situation, expected in TABLE]


@pytest.mark.parametrize(("situation", "expected"), CASES)
def test_what_is_decided(situation: Situation, expected: list[str]) -> None:
    found = [said(d) for d in decisions(deepcopy(situation))]
    assert len(found) == len(expected), found
    for text, start in zip(found, expected, strict=True):
        assert text.startswith(start)


def cause_of(situation: Situation) -> Cause:
    """Of a loss (whether it is then replaced or given up)."""
    (cause,) = [d.cause for d in decisions(situation) if isinstance(d, BreakView | GiveUp)]
    assert cause is not None
    return cause


@pytest.mark.parametrize(
    ("lost", "facts", "what", "advice"),
    [
        (killed(9), {}, KILLED, "look for a person, a container limit or another program"),
        (starved(AT_4), {}, "the machine ran out of memory", "Lower train.micro_batch"),
        (killed(11), {}, "signal 11 (SIGSEGV)", "A native library crashed"),
        (killed(15), {}, "signal 15 (SIGTERM)", ""),
        (ended(3, ago=9.0), {}, "exit code 3 without finishing", "Something called exit()"),
        (killed(9, fenced="it was silent"), {}, "it was silent", "its log may say"),
        (FAILED, {}, "trouble of 1", ""),
    ],
)  # fmt: skip
def test_an_end_is_explained(lost: Place, facts: Any, what: str, advice: str) -> None:
    cause = cause_of(now(IN, lost, w("in", step=7), STARTING, of=(2, 1, 0), **facts))
    assert what in cause.what and advice in cause.advice
    assert (cause.rank, cause.worker, cause.pid, cause.host) == (1, 1, 101, "here")
    known = lost is FAILED or cause.micro_batch == 4
    assert cause.step == (5 if known else 7) and not cause.request


def test_a_wrong_request_stays_one() -> None:
    assert cause_of(now(IN, IN, IN, troubles=[trouble(0, request=True)])).request


def test_a_worker_that_never_said_hello_can_be_blamed() -> None:
    def nameless(number: int) -> WorkerState:
        return WorkerState(number, "gone", exit=WorkerExit(number, 555, -9))

    assert cause_of(now(nameless, of=(), wanted=1, failed_starts=3)).pid == 555


def test_records_that_fail_twice_are_named() -> None:
    again = trouble(2, micro_batch=4, records=[7, 8])
    cause = cause_of(now(IN, FAILED, IN, troubles=[FAILED_1, again]))
    assert (cause.step, cause.micro_batch, cause.records) == (5, 4, (7, 8))
    assert "worker 1 had failed at the same micro-batch before" in cause.noticed_by


def test_the_place_where_two_ended_is_named() -> None:
    cause = cause_of(now(IN, LOOPED, LOOPED, STARTING))
    assert (cause.step, cause.micro_batch, cause.held_out) == (5, 4, False)
    assert "worker 1 had ended at the same place before" in cause.noticed_by
    scoring = killed(11, work=SCORING)
    cause = cause_of(now(IN, scoring, scoring, STARTING))
    assert (cause.step, cause.micro_batch, cause.held_out) == (5, 1, True)
    updating = killed(11, work=WorkInHand("update", 5))
    cause = cause_of(now(IN, updating, updating, STARTING))
    assert cause.micro_batch is None and "in the update of step 5" in cause.noticed_by


def test_where_one_was_killed_from_outside_says_nothing_unless_many_were() -> None:
    one = killed(9, work=AT_4)
    assert cause_of(now(IN, one, IN, STARTING)).micro_batch is None
    cause = cause_of(now(IN, one, one, one, STARTING, of=(0, 1), losses=6))
    assert (cause.step, cause.micro_batch) == (5, 4)


def test_a_host_that_goes_is_named_with_all_its_ranks() -> None:
    both = gone_with("a", AT_4)
    cause = cause_of(now(IN, both, both, killed(at="b"), STARTING, STARTING, STARTING))
    assert (cause.host, cause.ranks, cause.micro_batch) == ("name of a", (1, 2), None)


def test_what_another_host_does_not_have_is_to_be_shipped() -> None:
    absent = trouble(1, kind="ModuleNotFoundError")
    there, here = w("in", at="a", at_name="b1"), IN
    cause = cause_of(now(IN, there, IN, troubles=[absent]))
    assert cause.host == "b1" and "on host b1" in cause.advice and "--ship" in cause.advice
    assert "--ship" not in cause_of(now(IN, here, IN, troubles=[absent])).advice
    wrong = trouble(1, kind="TaskError", request=True, text="No such file or directory: 'x.py'")
    cause = cause_of(now(IN, there, IN, troubles=[wrong]))
    assert cause.what.startswith("host b1: No such") and "--ship" in cause.what


def test_a_failure_that_others_did_not_have_makes_a_worker_suspect() -> None:
    situation = now(IN, IN, IN, troubles=[FAILED_1, trouble(2)])
    assert suspicious(situation, 5) == []
    assert suspicious(situation, 6) == [FAILED_1]


def issued(situation: Situation) -> View:
    (decision,) = decisions(situation)
    assert isinstance(decision, IssueView)
    return decision.view


def test_a_view_carries_all_that_its_members_must_know() -> None:
    facts: dict[str, Any] = {
        "changes": {"lr": 0.1},
        "journal": {4: {"log.every_steps": 5}},
        "halts": 7,
        "scored": 30,
        "enough": "no better",
        "saved": 20,
        "audit": 3,
    }
    known = w("ready", built=b"model")
    found = issued(now(known, known, wanted=2, halted="-", restore=20, **facts))
    assert {key: getattr(found, key) for key in facts} == facts
    assert found.built == [b"model", b"model"] and not found.fresh and found.restore is None
    assert [(m.worker, m.rank, m.pid) for m in found.members] == [(0, 0, 100), (1, 1, 101)]


def test_speeds_are_those_measured_and_a_newcomer_counts_as_average() -> None:
    fast, slow = w("ready", micro_batch_s=0.1), w("ready", micro_batch_s=0.2)
    assert issued(now(fast, slow, fast, halted=UNEVEN, better=(1.0, 0.5, 1.0))).speeds == [
        1.0,
        0.5,
        1.0,
    ]
    assert issued(now(fast, slow, fast, halted="-")).speeds == [1.0] * 3, "no reason to change it"
    assert issued(now(slow, fast, WAITING, halted="-")).speeds == [0.5, 1.0, 0.5]
    assert (
        issued(now(fast, slow, GONE, WAITING, broken=BROKEN, rebalance=False)).speeds == [1.0] * 3
    )


def waits(measured: list[float]) -> list[float]:
    """When members who are never equally fast are dealt anew, if each deal is looked at so often
    (in seconds, after it began)."""
    situation, dealt = now(FAST, SLOW, FAST, micro_batches=12), list[float]()
    for _ in range(8):
        for situation.measured_s in measured:
            if isinstance(decision := decide(situation), HaltView):
                dealt.append(situation.measured_s)
                apply(situation, decision)
                situation.halted, situation.better, situation.running = None, (), True
                break
    return dealt


def test_dealing_anew_in_vain_calms_down() -> None:
    tenths = [k / 10 for k in range(1000)]
    assert waits(tenths) == [2, 4, 8, 16, 32, 60, 60, 60]
    assert waits([122.0]) == [122.0] * 8, "these had lasted"


def test_a_deal_that_lasted_or_other_members_make_it_attentive_again() -> None:
    uneven = now(FAST, SLOW, FAST, micro_batches=12, redealt=((0, 1, 2), 9))
    assert patience_s(uneven) == 60
    uneven.measured_s = 119.0
    assert redealt(uneven) == ((0, 1, 2), 10)
    uneven.measured_s = 121.0
    assert redealt(uneven) == ((0, 1, 2), 1)
    others = now(FAST, GONE, FAST, SLOW, of=(0, 2, 3), redealt=((0, 1, 2), 9))
    assert patience_s(others) == 2
    assert redealt(others) == ((0, 2, 3), 1)


@pytest.mark.parametrize(
    ("testimonies", "guilty", "more", "hopeless"),
    [
        ({0: (1, 1), 1: (1, 1), 2: (1, 1)}, [], False, False),
        ({0: (1, 1), 1: (2, 2), 2: (1, 1)}, [1], False, False),
        ({0: (1, 1), 1: (2, 2)}, [], True, False),
        ({0: (1, 1), 1: (2, 3)}, [1], False, False),
        ({0: (1, 1), 1: (2, 2), 2: (3, 3)}, [], True, False),
        ({0: (1, 1), 1: (2, 2), 2: (1, 1), 3: (4, 5)}, [1, 3], False, False),
        ({0: (1, 2), 1: (3, 4)}, [], False, True),
        ({0: (1, 1), 1: (3, 4), 2: (5, 6)}, [], False, True),
    ],
)
def test_who_computes_wrongly(
    testimonies: dict[int, tuple[int, ...]], guilty: list[int], more: bool, hopeless: bool
) -> None:
    found = judge(testimonies)
    assert (sorted(found.guilty), found.more, found.hopeless) == (guilty, more, hopeless)
    suspect = "keeps" in found.text and "from one micro-batch to the next" in found.text
    assert suspect != ("computed the same bits" in found.text), "the task may be it, too"
