"""Order without a list, records behind one contract, and micro-batches by position."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manyhands.data.open_data import open_data
from manyhands.data.ordering.epoch_order import order
from manyhands.data.ordering.keyed_permutation import permutation
from manyhands.data.reading.micro_batch_feed import MicroBatchFeed, held_out_batches
from manyhands.training.compute.seeds import seed_everything
from manyhands.values.errors import TaskError


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


def columns(n: int) -> dict[str, torch.Tensor]:
    return {"i": torch.arange(n), "x": torch.randn(n, 3)}


def feed(n: int = 101) -> MicroBatchFeed:
    records, _ = open_data(columns(n), None)
    return MicroBatchFeed(records, seed=5, batch=32, micro_batch=8, seeder=seed_everything)


def test_two_epochs_of_micro_batches_hold_every_record_twice() -> None:
    source = feed()
    seen: list[int] = []
    for step in range(8):
        here = source.cut(step)
        for micro_batch in source.micro_batches(here, range(len(here.sizes))):
            seen += micro_batch.batch["i"].tolist()
            assert source.ids(here, micro_batch.index) == micro_batch.batch["i"].tolist()
    assert sorted(seen) == sorted([*range(101), *range(101)])


def test_a_held_out_fraction_is_disjoint_and_does_not_depend_on_the_seed() -> None:
    train, held = open_data(columns(50), 0.2)
    assert held is not None and (len(train), len(held)) == (40, 10)
    ours = train.names(np.arange(40))
    theirs = held.names(np.arange(10))
    assert sorted([*ours, *theirs]) == list(range(50))


def test_held_out_batches_hold_every_record_once() -> None:
    records, _ = open_data(columns(23), None)
    batches = held_out_batches(records, batch=5, indices=range(5), seed=0, seeder=seed_everything)
    found = [(n, batch["i"].tolist()) for _, n, batch in batches]
    assert [n for n, _ in found] == [5, 5, 5, 5, 3]
    assert [i for _, ids in found for i in ids] == list(range(23))


@pytest.mark.parametrize(
    ("data", "held_out", "says"),
    [
        ({"x": torch.zeros(0, 3)}, None, "empty"),
        ({}, None, "empty dict"),
        ({"x": torch.zeros(3), "y": torch.zeros(4)}, None, "differ in length"),
        ({"x": ["a", "b"]}, None, "not numeric"),
        ({"x": torch.tensor(1.0)}, None, "single number"),
        (torch.zeros(3), None, "name its columns"),
        (iter([1]), None, "map-style"),
        ({"x": torch.zeros(1)}, 0.5, "nothing to train on"),
        ({"x": torch.zeros(5)}, {"x": torch.zeros(0)}, "held_out is empty"),
    ],
)
def test_data_that_cannot_be_read_is_refused(data: object, held_out: object, says: str) -> None:
    with pytest.raises(TaskError, match=says):
        open_data(data, held_out)
