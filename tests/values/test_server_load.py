"""What servers do, counted and added up: pure."""

import math
import random

import pytest

from manyhands.driver.server_loads import LATELY_S, WRITTEN_EVERY_S, ServerLoads
from manyhands.training.state.layout import lay_out
from manyhands.training.sync.load_meter import LoadMeter
from manyhands.values.server_load import (
    MOST_SIZES,
    ServerLoad,
    in_figures,
    longest_s,
    percentile_s,
    size_of_time,
)
from tests.support.situations import view


@pytest.mark.parametrize("seconds", [0.0, 1e-9, 1e-6, 3.3e-5, 1e-3, 0.017, 1.0, 4000.0, 1e8])
def test_a_time_is_counted_with_the_first_size_that_it_does_not_exceed(seconds: float) -> None:
    size = size_of_time(seconds)
    assert 0 <= size < MOST_SIZES
    if size < MOST_SIZES - 1:
        assert seconds <= longest_s(size) * (1 + 1e-12)
    if size > 0:
        assert seconds > longest_s(size - 1)


def test_percentiles_are_right_to_within_a_fifth() -> None:
    dice = random.Random(0)
    times = sorted(math.exp(dice.gauss(-7, 1)) for _ in range(5000))
    counts = [0] * MOST_SIZES
    for seconds in times:
        counts[size_of_time(seconds)] += 1
    for part in (0.5, 0.99):
        right = times[math.ceil(part * len(times)) - 1]
        assert right <= percentile_s(counts, part) <= 1.2 * right
    assert percentile_s([], 0.5) == 0.0


def load(applied: int, times: list[int], share: float = 0.5) -> ServerLoad:
    return ServerLoad(2.0, share, applied, 100 * applied, 0.5, 3 * applied, times)


def test_loads_add_up_and_the_share_is_the_last_one() -> None:
    both = load(4, [1, 3], 0.5) + load(6, [0, 2, 4], 0.25)
    assert both == ServerLoad(4.0, 0.25, 10, 1000, 1.0, 30, [1, 5, 4])
    figures = in_figures(1, 7, both)
    assert (figures.applied_per_s, figures.bytes_per_s) == (2.5, 250.0)
    assert (figures.share, figures.busy, figures.queue) == (0.25, 0.25, 3.0)
    assert (figures.p50_s, figures.p99_s) == (longest_s(1), longest_s(2))


def test_nothing_applied_is_no_division_by_zero() -> None:
    figures = in_figures(0, 0, ServerLoad())
    assert figures.applied_per_s == figures.queue == figures.p99_s == 0.0


def test_the_driver_shows_what_was_lately_and_writes_down_what_it_has_not_told() -> None:
    loads = ServerLoads(0.0)
    loads.begin(view(5, 6, 7, speeds=(0.0, 1.0, 0.0)))
    loads.hear(5, load(10, [10]), 1.0)
    loads.hear(7, load(20, [20]), 1.0)
    loads.hear(5, load(1, [0, 1]), 1.0 + 1.5 * LATELY_S)
    assert [(s.rank, s.worker, s.applied) for s in loads.lately()] == [(0, 5, 1), (2, 7, 20)]
    assert not loads.due(WRITTEN_EVERY_S - 1) and loads.due(WRITTEN_EVERY_S)
    # Worker 7 is gone, and 6 serves in its place.
    loads.begin(view(5, 6, speeds=(0.0, 0.0)))
    assert [s.worker for s in loads.lately()] == [5]
    told = loads.untold(WRITTEN_EVERY_S)
    assert [(s.rank, s.worker, s.applied) for s in told] == [(0, 5, 11), (2, 7, 20)]
    assert loads.untold(WRITTEN_EVERY_S) == [] and not loads.due(WRITTEN_EVERY_S + 1)


def test_a_meter_tells_of_servers_alone_and_of_everything_once() -> None:
    meter = LoadMeter()
    meter.applied(0.5)
    assert meter.take() is None
    meter.serve(lay_out([]), [])
    meter.applied(0.001, 0.002, waiting=2)
    meter.applied(0.001, 0.004)
    found = meter.take()
    assert found is not None and (found.applied, found.waiting) == (2, 2)
    assert found.busy_s == pytest.approx(0.002) and len(found.times) == size_of_time(0.004) + 1
    assert sum(found.times) == 2
    again = meter.take()
    assert again is not None and again.applied == 0 and again.times == []
    meter.rest()
    assert meter.take() is None
