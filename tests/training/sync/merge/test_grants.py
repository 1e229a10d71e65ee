"""Whatever happens in whatever order: meetings find exactly the steps before them applied, no step
is dealt twice at a time, and no bound is exceeded."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.training.sync.merge.grants import (
    ReadStates,
    deal_after,
    first_due,
    grant,
    meeting_at,
    next_pusher,
)
from manyhands.training.sync.merge.staleness import AppliedSteps, StepDeal, may_begin

TOTAL = 16


@settings(max_examples=60)
@given(
    st.data(),
    st.sampled_from([None, 1, 2, 5]),
    st.integers(1, 5),
    st.integers(3, 10),
)
def test_a_run_with_losses(
    data: st.DataObject, bound: int | None, workers: int, every: int
) -> None:
    """A model of the head: workers take, push and die, commands come, in any order."""
    order: list[int] = []
    applied = AppliedSteps()
    held: dict[int, int] = {}

    def due(n: int) -> int:
        return min(TOTAL, (n // every + 1) * every)

    deal, met = deal_after(applied), 0
    until, commanded = first_due(applied, due(0)), False
    for _ in range(200):
        n = len(order)
        if n == TOTAL:
            break
        stop = meeting_at(n, deal.claimed, until, commanded=commanded)
        assert deal.claimed <= stop and n < stop <= until
        match data.draw(st.sampled_from(["take", "take", "push", "push", "lose", "command"])):
            case "take":
                worker = data.draw(st.integers(0, workers - 1))
                if worker in held:
                    continue
                deal, step = grant(deal, applied, worker, bound=bound, stop=stop)
                if step is not None:
                    assert step not in held.values() and not applied.covers(step)
                    assert step < stop and may_begin(step, applied, bound)
                    held[worker] = step
            case "push" if held:
                worker = data.draw(st.sampled_from(sorted(held)))
                step = held.pop(worker)
                deal, applied = deal.finish(step), applied.add(step)
                order.append(step)
                if n + 1 == stop:
                    assert applied == AppliedSteps(stop), "all before the meeting, and no other"
                    met, until, commanded = stop, due(stop), False
            case "lose":
                held.clear()
                deal, commanded = deal_after(applied), False
                until = first_due(applied, due(n))
            case "command":
                commanded = True
            case _:
                pass
    else:
        return  # nobody took anything for long: that may be
    assert sorted(order) == list(range(TOTAL)) and met == TOTAL


@pytest.mark.parametrize(("loosened", "found"), [(0, False), (1, True)])
def test_a_bound_that_is_exceeded_is_found(loosened: int, found: bool) -> None:
    """Two workers, of whom one never comes back: the other goes as far as it may."""
    bound = 3
    reads, applied, deal = ReadStates(bound, 0, AppliedSteps()), AppliedSteps(), StepDeal()
    deal, first = grant(deal, applied, 0, bound=bound, stop=100)
    assert first == 0
    problems: list[str | None] = []
    for done in range(20):
        deal, step = grant(deal, applied, 1, bound=bound + loosened, stop=100)
        if step is None:
            break
        problems.append(reads.problem(step, done))
        deal, applied = deal.finish(step), applied.add(step)
        reads.add(done + 1, applied)
    assert len(problems) == bound + loosened
    assert (problems[-1] is not None) == found and not any(problems[:-1])


def test_a_command_is_met_where_what_was_dealt_ends() -> None:
    assert meeting_at(8, 10, 100, commanded=True) == 10
    assert meeting_at(8, 8, 100, commanded=True) == 9  # one more: it must be told with a push
    assert meeting_at(8, 10, 10, commanded=False) == 10


@pytest.mark.parametrize(
    ("pushed", "taken", "last", "expected"),
    [([1, 1], [0, 0], -1, 0), ([2, 1], [1, 0], 0, 1), ([1, 0], [1, 0], 0, None), ([1], [0], 0, 0)],
)
def test_pushes_are_taken_in_turns(
    pushed: list[int], taken: list[int], last: int, expected: int | None
) -> None:
    assert next_pusher(pushed, taken, last) == expected
