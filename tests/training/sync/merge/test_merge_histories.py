"""Histories that are right are found right, and every rule is found broken where it is."""

from itertools import count
from pathlib import Path
from random import Random

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manyhands.training.sync.merge.history import (
    RULES,
    HistoryEvent,
    PushApplied,
    PushMade,
    PushSettled,
    Recorder,
    ViewEntered,
    read_history,
    violations,
)
from manyhands.training.sync.merge.staleness import NO_STEPS, AppliedSteps

STEPS = 12


def steps(row: list[int]) -> AppliedSteps:
    found = NO_STEPS
    for step in row:
        found = found.add(step)
    return found


def right(seed: int) -> list[HistoryEvent]:
    """Hosts apply one line of pushes, none before the one before it is everywhere. They die with
    what they have, others come and are given everything; a push may be applied again after a
    death, and what was not acknowledged may be lost with its hosts."""
    rng, times, numbers = Random(seed), count(), count(1)
    hosts = [next(numbers) for _ in range(rng.randint(1, 3))]
    rows: dict[int, list[int]] = {host: [] for host in hosts}
    told: list[HistoryEvent] = []
    generation = 0

    def at() -> float:
        return float(next(times))

    def enter() -> None:
        nonlocal generation
        generation += 1
        longest = max(rows.values(), key=len)
        for host in hosts:
            if rng.random() < 0.5 and len(rows[host]) < len(longest) and rows[host]:
                n = len(rows[host])  # the last push, once more: it was half applied
                again = PushApplied(at=at(), memory=host, number=n - 1, step=rows[host][-1])
                told.append(again)
            rows[host] = list(longest)
            words, done = steps(longest).words, len(longest)
            entered = ViewEntered(
                at=at(), memory=host, generation=generation, done=done, applied=words
            )
            told.append(entered)

    enter()
    while len(rows[hosts[0]]) < STEPS:
        n = len(rows[hosts[0]])
        before = steps(rows[hosts[0]])
        step = rng.choice(before.missing(min(STEPS, before.prefix + 3)))
        maker = rng.choice(hosts)
        told.append(PushMade(at=at(), memory=maker, worker=10 * maker, step=step, read=n))
        having = rng.randint(0, len(hosts))
        for host in hosts[:having]:
            rows[host].append(step)
            told.append(PushApplied(at=at(), memory=host, number=n, step=step))
        if having == len(hosts):
            told.append(PushSettled(at=at(), memory=hosts[0], number=n, step=step))
            if rng.random() < 0.25:
                enter()
            continue
        dies = rng.random() < 0.5 and len(hosts) > 1
        if dies:
            del rows[hosts.pop(0)]
        if rng.random() < 0.5:
            hosts.append(next(numbers))
            rows[hosts[-1]] = []
        enter()
    return told


@given(st.integers(0, 1 << 32))
def test_what_is_right_is_found_right(seed: int) -> None:
    assert violations(right(seed), bound=2, done=range(STEPS)) == []


# ---- one host, or two, that do what they should; and then something else


def line(*row: int, memory: int = 1, since: float = 0.0) -> list[HistoryEvent]:
    told: list[HistoryEvent] = [
        ViewEntered(at=since, memory=memory, generation=1, done=0, applied=(0,))
    ]
    told += [
        PushApplied(at=since + n + 1, memory=memory, number=n, step=s) for n, s in enumerate(row)
    ]
    return told


def settled(n: int, step: int) -> HistoryEvent:
    return PushSettled(at=50.0, memory=1, number=n, step=step)


def made(step: int, read: int, at: float = 60.0) -> HistoryEvent:
    return PushMade(at=at, memory=1, worker=3, step=step, read=read)


def entered(memory: int, done: int, *words: int) -> HistoryEvent:
    return ViewEntered(at=40.0, memory=memory, generation=2, done=done, applied=words)


WRONG: dict[str, list[list[HistoryEvent]]] = {
    "lost": [
        [*line(0, 1), settled(2, 2)],
        [*line(0, 1), settled(1, 2)],  # another has its number
        [*line(0, 1, 2), entered(1, 2, 2), settled(2, 2)],
    ],
    "twice": [line(0, 1, 0), line(0, 0)],
    "order": [
        [*line(0), PushApplied(at=9.0, memory=1, number=2, step=1)],
        [*line(0, 1), PushApplied(at=9.0, memory=1, number=0, step=2)],
        [*line(0, 1), entered(2, 2, 0, 1, 3)],  # nobody had steps 1 and 2
    ],
    "differ": [
        [*line(0, 1, 2), *line(0, 2, 1, memory=2, since=0.5)],
        [*line(0), msgspec.structs.replace(line()[0], memory=2, digest=7)],
    ],
    "vanished": [
        [*line(0), made(1, 2)],  # a version that there is not
        [*line(0, 2, 1), made(3, 3, at=30.0), entered(1, 1, 1)],
    ],
    "backwards": [[*line(0, 1), made(2, 2), made(3, 1, at=61.0)]],
    "stale": [[*line(0, 1, 2), made(5, 2)]],
    "never": [line(0, 1, 3)],
}


@pytest.mark.parametrize("rule", RULES)
def test_what_is_wrong_is_found(rule: str) -> None:
    for history in WRONG[rule]:
        done = range(4) if rule == "never" else ()
        found = {v.rule for v in violations(history, bound=2, done=done)}
        assert rule in found, (history, found)


def test_of_two_hosts_one_may_be_a_push_behind() -> None:
    assert violations([*line(0, 1, 2), *line(0, 1, memory=2, since=0.5)]) == []


# ---- what is recorded


def test_what_was_recorded_is_read_again(tmp_path: Path) -> None:
    for record in (Recorder(), Recorder(str(tmp_path), worker=3)):  # nobody asked for the first
        record.entered(1, 0, NO_STEPS, [torch.ones(3)])
        record.applies(0, 0)
        record.made(1, 1)
        record.settled(0, 0)
    found = read_history(tmp_path)
    assert [type(e) for e in found] == [ViewEntered, PushApplied, PushMade, PushSettled]
    assert [msgspec.structs.asdict(e)["at"] for e in found] == sorted(e.at for e in found)
    assert violations(found) == []
