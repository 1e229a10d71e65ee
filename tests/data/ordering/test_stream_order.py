"""A stream's windows are permuted, each by itself, and each record stands in one place."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from manyhands.accounting.deal_micro_batches import ENDLESS
from manyhands.data.ordering.stream_order import StreamOrder


@given(st.integers(1, 300), st.integers(1, 50), st.integers(0, 3), st.integers(0, 3))
def test_every_record_stands_in_its_window_once(
    size: int, window: int, seed: int, epoch: int
) -> None:
    found = StreamOrder(seed, epoch, size, window)[range(size)]
    assert sorted(found.tolist()) == list(range(size))
    assert (found // window == np.arange(size) // window).all()


@given(st.integers(1, 50), st.lists(st.integers(0, 10**6), min_size=1, max_size=20))
def test_what_stands_at_a_position_depends_on_nothing_else(
    window: int, positions: list[int]
) -> None:
    order = StreamOrder(1, 0, ENDLESS, window)
    together = order[np.asarray(positions)]
    assert together.tolist() == [int(order[np.asarray([p])][0]) for p in positions]


def test_windows_and_epochs_are_shuffled_in_their_own_ways() -> None:
    first, second = (StreamOrder(0, e, 200, 100)[range(200)] for e in (0, 1))
    assert first[:100].tolist() != (first[100:] - 100).tolist()
    assert first.tolist() != second.tolist()
    assert StreamOrder(0, 0, 200, 1)[range(5)].tolist() == [0, 1, 2, 3, 4]
