"""Records behind one contract, and micro-batches by position."""

import numpy as np
import pytest
import torch

from manyhands.data.open_data import open_data
from manyhands.data.reading.micro_batch_feed import MicroBatchFeed, held_out_batches
from manyhands.training.compute.seeds import seed_everything
from manyhands.values.errors import TaskError


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
        (iter([1]), None, "can be read once"),
        ({1, 2}, None, "map-style"),
        ({"x": torch.zeros(1)}, 0.5, "nothing to train on"),
        ({"x": torch.zeros(5)}, {"x": torch.zeros(0)}, "held_out is empty"),
    ],
)
def test_data_that_cannot_be_read_is_refused(data: object, held_out: object, says: str) -> None:
    with pytest.raises(TaskError, match=says):
        open_data(data, held_out)
