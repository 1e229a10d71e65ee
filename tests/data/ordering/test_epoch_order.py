"""Order without a list: every record once, at random, and never another between releases."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from manyhands.data.ordering.epoch_order import order
from manyhands.data.ordering.keyed_permutation import permutation


@given(size=st.integers(1, 5000), seed=st.integers(0, 2**62), epoch=st.integers(0, 10**6))
def test_an_epoch_visits_every_record_once(size: int, seed: int, epoch: int) -> None:
    assert sorted(order(seed, epoch, size)[range(size)]) == list(range(size))


def test_any_position_can_be_asked_for_by_itself() -> None:
    here = order(3, 1, 10_007)
    assert [here[[p]][0] for p in (0, 9_999, 42)] == here[[0, 9_999, 42]].tolist()


def test_orders_look_random() -> None:
    size = 20_000
    mixed = order(0, 0, size)[range(size)]
    assert abs(np.corrcoef(np.arange(size), mixed)[0, 1]) < 0.03
    assert (mixed == np.arange(size)).sum() < 10  # a random permutation has one fixed point
    assert (order(0, 1, size)[range(size)] == mixed).sum() < 10
    neighbours = np.abs(np.diff(mixed))
    assert 0.3 < neighbours.mean() / size < 0.36  # a third of the range


def test_order_never_changes_between_releases() -> None:
    """Checkpoints hold a position; what stands there is a promise."""
    assert permutation(10, "order", 0, 0)[range(10)].tolist() == [8, 5, 1, 3, 2, 0, 4, 6, 9, 7]
