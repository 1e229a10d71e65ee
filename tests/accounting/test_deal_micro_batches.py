"""Cutting and dealing: pure arithmetic that everything else stands on."""

from hypothesis import given
from hypothesis import strategies as st

from manyhands.accounting.deal_micro_batches import (
    cut,
    cut_sizes,
    deal,
    root,
    steps_per_epoch,
    subtree_counts,
    subtrees,
)

counts = st.integers(1, 300)


@given(records=st.integers(1, 500), batch=counts, parts=st.integers(1, 20))
def test_every_position_of_an_epoch_is_in_exactly_one_micro_batch(
    records: int, batch: int, parts: int
) -> None:
    micro_batch = max(1, batch // parts)
    seen: list[int] = []
    for step in range(steps_per_epoch(records, batch)):
        here = cut(step, records=records, batch=batch, micro_batch=micro_batch)
        assert here.epoch == 0 and all(here.sizes)
        assert max(here.sizes) <= micro_batch and max(here.sizes) - min(here.sizes) <= 1
        for index in range(len(here.sizes)):
            seen += here.positions(index)
    assert seen == list(range(records))


def test_a_single_last_record_joins_the_batch_before_it() -> None:
    assert steps_per_epoch(33, 32) == 1
    assert cut(0, records=33, batch=32, micro_batch=8).sizes == (7, 7, 7, 6, 6)
    assert steps_per_epoch(1, 32) == 1
    assert cut_sizes(30, 8) == (8, 8, 7, 7)


def test_the_second_epoch_starts_over() -> None:
    here = cut(5, records=100, batch=32, micro_batch=8)
    assert (here.epoch, here.start, here.stop) == (1, 32, 64)
    assert sum(here.share(i) for i in range(4)) == 1.0


@given(
    m=st.integers(1, 40), speeds=st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=1, max_size=9)
)
def test_a_deal_covers_all_micro_batches_in_order_and_in_the_least_time(
    m: int, speeds: list[float]
) -> None:
    ranges = deal(m, tuple(speeds))
    assert [i for r in ranges for i in r] == list(range(m))
    slowest = max(len(r) / s for r, s in zip(ranges, speeds, strict=True))
    faster = [int(slowest * 0.999 * s) for s in speeds]
    assert sum(faster) < m, "everyone could have been done earlier"


def deal_slowly(micro_batches: int, speeds: tuple[float, ...]) -> tuple[range, ...]:
    """`deal` as it was first written: every time is tried, and every range is kept."""

    def within(time: float, speed: float) -> int:
        return int(time * speed + 1e-9)

    quickest = min(
        k / speed
        for speed in speeds
        for k in range(1, micro_batches + 1)
        if sum(within(k / speed, s) for s in speeds) >= micro_batches
    )
    best: dict[int, tuple[int, tuple[range, ...]]] = {0: (0, ())}
    for speed in speeds:
        following: dict[int, tuple[int, tuple[range, ...]]] = {}
        most = within(quickest, speed)
        for start, (trees, ranges) in best.items():
            for length in range(most, max(0, most - 3) - 1, -1):
                mine = range(start, start + length)
                if mine.stop > micro_batches:
                    continue
                candidate = (trees + len(subtrees(mine, micro_batches)), (*ranges, mine))
                if mine.stop not in following or candidate[0] < following[mine.stop][0]:
                    following[mine.stop] = candidate
        best = following
    return best[micro_batches][1]


@given(
    m=st.integers(1, 70),
    speeds=st.lists(
        st.sampled_from([1.0, 1.0, 2.0, 0.5]) | st.floats(0.05, 20.0), min_size=1, max_size=12
    ),
)
def test_a_quick_deal_is_the_slow_one(m: int, speeds: list[float]) -> None:
    assert deal(m, tuple(speeds)) == deal_slowly(m, tuple(speeds))


def test_equal_workers_are_dealt_to_as_slowly_done() -> None:
    for m in (1, 7, 64, 100, 512):
        for workers in (1, 3, 16, 64):
            assert deal(m, (1.0,) * workers) == deal_slowly(m, (1.0,) * workers), (m, workers)


@given(m=st.integers(1, 130), data=st.data())
def test_subtrees_are_counted_without_making_them(m: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, m))
    stop = data.draw(st.integers(start, m))
    assert subtree_counts(m)(start, stop) == len(subtrees(range(start, stop), m))


@given(m=st.integers(1, 64), data=st.data())
def test_subtrees_tile_their_range(m: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, m))
    stop = data.draw(st.integers(start, m))
    nodes = subtrees(range(start, stop), m)
    covered = [i for n in nodes for i in range(n.start, min(n.start + (1 << n.level), m))]
    assert covered == list(range(start, stop))
    if (start, stop) == (0, m):
        assert nodes == (root(m),)


def test_equal_workers_get_aligned_ranges_where_the_numbers_allow() -> None:
    for workers in (1, 2, 4, 8):
        assert all(len(subtrees(r, 8)) == 1 for r in deal(8, (1.0,) * workers))
    assert deal(9, (1.0, 2.0)) == (range(0, 3), range(3, 9))


def test_the_leader_always_has_something_to_do() -> None:
    """It names the numbers that are logged."""
    for m in range(1, 25):
        for workers in range(1, 10):
            assert len(deal(m, (1.0,) * workers)[0]) > 0, (m, workers)
