"""The bound, what was applied as a few words, and steps that are dealt again."""

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.training.sync.merge.grants import deal_after
from manyhands.training.sync.merge.staleness import (
    AT_ONCE,
    MOST_WORDS,
    WIDEST,
    AppliedSteps,
    StalenessCounts,
    StepDeal,
    may_begin,
    needed_below,
    next_step,
)

some_steps = st.lists(st.integers(0, 40), max_size=40)


def applied(steps: list[int]) -> AppliedSteps:
    found = AppliedSteps()
    for step in steps:
        found = found.add(step)
    return found


@given(steps=some_steps)
def test_applied_steps_are_the_set_of_them_in_few_words(steps: list[int]) -> None:
    found = applied(steps)
    assert [s for s in range(60) if found.covers(s)] == sorted(set(steps))
    assert found == applied(sorted(steps)) and found.count == len(set(steps))
    words = json.loads(json.dumps(found.words))
    assert AppliedSteps.from_words(words) == found
    assert AppliedSteps.from_words([*words, 0, 0, 0, 0]) == found
    assert len(found.beyond) <= len(found.missing(max([0, *steps])))


@pytest.mark.parametrize(
    "words", [[], [-1], [1, 2], [5, 5, 6], [3, 9, 8], [3, 6, 8, 8, 9], [3, 2, 9]]
)
def test_words_that_no_value_has_are_refused(words: list[int]) -> None:
    with pytest.raises(ValueError, match="no applied steps"):
        AppliedSteps.from_words(words)


def test_a_slow_worker_costs_no_room_however_far_the_others_are() -> None:
    found = applied([0, 1, 2])
    for step in range(4, 5000):
        found = found.add(step)
    assert found.words == (3, 4, 5000)


def test_the_bound_in_examples() -> None:
    assert may_begin(5, AppliedSteps(5), 0) and not may_begin(5, AppliedSteps(4), 0)
    assert may_begin(5, AppliedSteps(3), 2) and not may_begin(5, AppliedSteps(2, ((3, 5),)), 2)
    assert may_begin(1000, AppliedSteps(0), None)
    assert (needed_below(5, 2), needed_below(1, 2), needed_below(9, None)) == (3, 0, 0)


def test_lost_steps_come_first_then_new_ones_and_never_too_many() -> None:
    assert next_step(7, AppliedSteps(3), [5, 4]) == 4
    assert next_step(7, AppliedSteps(3, ((4, 5),)), [4]) == 7, "somebody finished it"
    assert next_step(7, AppliedSteps(7), [], stop=7) is None
    assert next_step(7, AppliedSteps(3), [6], stop=7) == 6
    assert next_step(AT_ONCE, AppliedSteps(0), []) is None
    assert next_step(AT_ONCE, AppliedSteps(1), []) == AT_ONCE


@given(seed=st.integers(0, 2**32), bound=st.none() | st.integers(0, 4), workers=st.integers(1, 5))
def test_whoever_is_lost_every_step_is_done_and_none_is_staler_than_the_bound_allows(
    seed: int, bound: int | None, workers: int
) -> None:
    draw, stop = random.Random(seed), 30
    deal, table = StepDeal(), AppliedSteps()
    holding: dict[int, int] = {}  # worker → step that it has been dealt
    reading: dict[int, tuple[AppliedSteps, int]] = {}  # worker → what it computes on
    counts, version, dead = StalenessCounts(), 0, set[int]()
    while deal.finished.prefix < stop:
        worker = draw.randrange(workers)
        if worker in dead:
            continue
        if draw.random() < 0.1:  # it is lost, and a new view begins with what was applied
            if len(dead) < workers - 1 and draw.random() < 0.5:
                dead.add(worker)  # for good
            deal = deal_after(table)
            holding.clear()
            reading.clear()
        elif worker not in holding:
            deal, step = deal.take(worker, stop)
            if step is not None:
                assert step not in holding.values(), "two workers have it"
                holding[worker] = step
        elif worker not in reading:
            if may_begin(holding[worker], table, bound):
                reading[worker] = (table, version)
        else:
            step, (read, at) = holding.pop(worker), reading.pop(worker)
            assert bound is None or not read.missing(step - bound)
            assert not table.covers(step), "twice"
            table, version = table.add(step), version + 1
            counts = counts.add(at, version)
            assert len(table.words) <= MOST_WORDS and len(table.beyond) < workers + 1
            deal = deal.finish(step)
    assert table == AppliedSteps(stop) and counts.total == stop
    assert bound is None or counts.largest <= 2 * bound
    assert bound != 0 or counts.counts == (stop,)


@given(a=st.lists(st.integers(0, 2000)), b=st.lists(st.integers(0, 50)))
def test_staleness_is_counted_and_added(a: list[int], b: list[int]) -> None:
    both, parts = StalenessCounts(), [StalenessCounts(), StalenessCounts()]
    for k, values in enumerate((a, b)):
        for s in values:
            both, parts[k] = both.add(10, 11 + s), parts[k].add(3, 4 + s)
    assert parts[0] + parts[1] == both == parts[1] + parts[0]
    assert both.total == len(a) + len(b)
    capped = sorted(min(s, WIDEST) for s in a + b)
    if capped:
        assert both.largest == capped[-1] and both.quantile(0.5) == capped[(len(capped) - 1) // 2]
        assert both.mean == pytest.approx(sum(capped) / len(capped))


def test_a_push_cannot_have_read_what_it_made() -> None:
    with pytest.raises(ValueError, match="version 3"):
        StalenessCounts().add(3, 3)
    with pytest.raises(ValueError, match="only 0"):
        StepDeal().finish(0)
