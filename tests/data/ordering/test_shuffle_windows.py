"""The order of an epoch over shards: every record once, in windows of a few whole shards."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from manyhands.data.ordering.epoch_order import order
from manyhands.data.ordering.shuffle_windows import ShardOrder

SIZES = st.lists(st.integers(0, 40), min_size=1, max_size=30)


@given(sizes=SIZES, window=st.integers(1, 200), seed=st.integers(0, 2**62), epoch=st.integers(0, 9))
def test_an_epoch_over_shards_visits_every_record_once(
    sizes: list[int], window: int, seed: int, epoch: int
) -> None:
    here = ShardOrder(seed, epoch, sizes, window)
    assert sorted(here[range(sum(sizes))].tolist()) == list(range(sum(sizes)))
    assert sorted(s for shards in here.windows.shards for s in shards) == list(range(len(sizes)))


@given(sizes=SIZES, window=st.integers(1, 200), data=st.data())
def test_what_stands_at_a_position_does_not_depend_on_what_is_asked_with_it(
    sizes: list[int], window: int, data: st.DataObject
) -> None:
    size = sum(sizes)
    here = ShardOrder(5, 1, sizes, window)
    whole = here[range(size)]
    cuts = sorted(data.draw(st.lists(st.integers(0, size), max_size=5)))
    pieces = [here[range(a, b)] for a, b in zip([0, *cuts], [*cuts, size], strict=True)]
    assert np.concatenate(pieces).tolist() == whole.tolist()
    if size:
        some = data.draw(st.lists(st.integers(0, size - 1), max_size=9))
        assert here[np.asarray(some, dtype=np.int64)].tolist() == [whole[i] for i in some]


@given(sizes=SIZES, window=st.integers(1, 200))
def test_a_window_is_a_few_whole_shards_with_enough_records(sizes: list[int], window: int) -> None:
    here = ShardOrder(5, 1, sizes, window)
    bounds = np.concatenate([[0], np.cumsum(sizes)])
    at = 0
    for shards in here.windows.shards:
        held = sum(sizes[s] for s in shards)
        assert held >= window or len(here.windows.shards) == 1
        found = np.searchsorted(bounds, here[range(at, at + held)], side="right") - 1
        assert set(found.tolist()) <= set(shards)
        at += held
    assert at == sum(sizes)


def test_what_fits_in_one_window_is_ordered_as_if_there_were_no_shards() -> None:
    expected = order(3, 2, 100)[range(100)].tolist()
    for sizes in ([100], [30, 70], [0, 10, 0, 90]):
        assert ShardOrder(3, 2, sizes, 60)[range(100)].tolist() == expected


def test_shards_are_read_in_another_order_in_every_epoch() -> None:
    firsts = {ShardOrder(3, epoch, [10] * 50, 10).windows.shards[0][0] for epoch in range(20)}
    assert len(firsts) > 10


def test_the_order_over_shards_never_changes_between_releases() -> None:
    found = ShardOrder(1, 0, [3, 4, 5], 3)[range(12)].tolist()
    assert found == [4, 3, 5, 6, 9, 11, 10, 8, 7, 1, 2, 0]
