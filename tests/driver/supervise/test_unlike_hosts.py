"""Hosts that compute other bits: who is the first, who is turned away, what people are told."""

from typing import Any

import msgspec
import pytest

from manyhands.driver.supervise.decisions import DropHost, IssueView, Wait
from manyhands.driver.supervise.membership import decide
from manyhands.driver.supervise.unlike_hosts import UnlikeHosts, first_host
from manyhands.driver.supervise.worker_states import ComputingHost, Situation, WorkerState
from manyhands.values import events
from manyhands.values.kernels import COMPILED, Kernels, otherwise, unlike

AMD = Kernels("AMD EPYC", "AVX2", "2.13.0", {"products": "a1", "sums": "s"})
INTEL = Kernels("Xeon", "AVX512", "2.13.0", {"products": "b2", "sums": "s"})


def worker(number: int, at: str, kernels: Kernels | None, **facts: Any) -> WorkerState:
    facts = {"phase": "waiting" if kernels else "starting", **facts}
    name = at or "home"
    return WorkerState(number, at=at, at_name=name, host=name, kernels=kernels, **facts)


def situation(*workers: WorkerState, **facts: Any) -> Situation:
    return Situation(
        wanted=len(workers), capacity=8, workers={w.number: w for w in workers}, **facts
    )


def test_only_what_both_have_tried_is_compared() -> None:
    bf16 = Kernels("AMD EPYC", "AVX2", "2.13.0", {**AMD.marks, "bf16": "x"})
    assert unlike(AMD, INTEL) == ["products"]
    assert unlike(AMD, bf16) == []


def test_a_host_that_computes_other_bits_is_turned_away_before_the_first_view() -> None:
    now = situation(worker(0, "b", INTEL), worker(1, "", AMD))
    decision = decide(now)
    assert isinstance(decision, DropHost) and decision.at == "b"
    assert decision.because == "it computes otherwise than home (products)"


def test_the_drivers_own_host_is_the_first_and_is_waited_for() -> None:
    now = situation(worker(0, "b", INTEL), worker(1, "", None))
    assert first_host(now) is None and isinstance(decide(now), Wait)


def test_without_it_the_first_worker_s_is() -> None:
    now = situation(worker(0, "b", INTEL), worker(1, "c", AMD))
    assert first_host(now) == ComputingHost("b", INTEL)
    decision = decide(now)
    assert isinstance(decision, DropHost) and decision.at == "c"


def test_once_begun_the_first_stays_the_first() -> None:
    now = situation(worker(2, "b", INTEL), first_host=ComputingHost("home", AMD))
    decision = decide(now)
    assert isinstance(decision, DropHost) and decision.at == "b"


def test_the_drivers_own_host_cannot_be_turned_away() -> None:
    now = situation(worker(2, "", INTEL), first_host=ComputingHost("b", AMD))
    assert isinstance(decide(now), IssueView)


def test_those_who_are_allowed_to_may_mix() -> None:
    now = situation(worker(0, "", AMD), worker(1, "b", INTEL), unlike="warn")
    assert isinstance(decide(now), IssueView)


@pytest.mark.parametrize("mode", ["refuse", "warn"])
def test_people_are_told_once_who_differs_and_what_to_do(mode: Any) -> None:
    told: list[str] = []

    def tell(event: events.AnyEvent) -> None:
        assert isinstance(event, events.Warned)
        told.append(event.text)

    watch = UnlikeHosts(
        situation(worker(0, "", AMD), worker(1, "b", INTEL), worker(2, "b", INTEL), unlike=mode),
        tell,
    )
    watch.look()
    watch.look()
    (text,) = told
    assert "b computes otherwise than home, with other bits in products" in text
    assert "Xeon" in text and "AMD EPYC" in text and "train.portable=true" in text
    assert ("b is turned away" in text) == ("train.unlike=warn" in text) == (mode == "refuse")


@pytest.mark.parametrize(
    ("other", "cure"),
    [
        ({"compiler": "GCC 13", "marks": {**AMD.marks, COMPILED: "d"}}, "Give both the same C++"),
        (
            {"processor": "Xeon", "marks": {"products": "b2", COMPILED: "c"}},
            "Without train.compile,",
        ),
    ],
)
def test_hosts_that_compile_are_told_what_helps_there(other: dict[str, Any], cure: str) -> None:
    told: list[events.AnyEvent] = []
    compiles = Kernels(
        "AMD EPYC", "AVX2", "2.13.0", {**AMD.marks, COMPILED: "c"}, compiler="GCC 12"
    )
    another = msgspec.structs.replace(compiles, **other)
    UnlikeHosts(situation(worker(0, "", compiles), worker(1, "b", another)), told.append).look()
    (event,) = told
    assert isinstance(event, events.Warned)
    assert cure in event.text and "compiled by GCC 12" in event.text
    assert another.compiler in event.text


def test_machines_of_a_resume_are_compared_by_what_they_compute() -> None:
    renamed = Kernels("AMD EPYC 2", "AVX2", "2.13.0", AMD.marks)
    assert otherwise([AMD], [renamed]) is None and otherwise([], [AMD]) is None
    text = otherwise([AMD], [INTEL])
    assert text is not None and "other bits in products" in text and "then: AMD EPYC" in text
