"""Records that are drawn: pure in (seed, epoch, position), and as often as they should be."""

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manyhands.data.ordering.epoch_order import order
from manyhands.data.ordering.own_sampler import OwnSampler
from manyhands.data.ordering.sampling import (
    Balanced,
    FirstPositions,
    InOrder,
    Repeated,
    Sampling,
    Weighted,
    read_classes,
    read_weights,
)
from manyhands.values.errors import TaskError

WEIGHTS = st.lists(st.one_of(st.just(0.0), st.floats(1e-6, 1e6)), min_size=1, max_size=200).filter(
    any
)
SEEDS = st.integers(0, 2**63 - 1)
EPOCHS = st.integers(0, 10**6)


def epoch_of(sampling: Sampling, seed: int = 0, epoch: int = 0) -> list[int]:
    return sampling.order(seed, epoch)[range(sampling.positions)].tolist()


@given(WEIGHTS, st.booleans(), SEEDS, EPOCHS, st.data())
def test_any_position_can_be_asked_for_by_itself(
    weights: list[float], replacement: bool, seed: int, epoch: int, data: st.DataObject
) -> None:
    drawn = Weighted(np.asarray(weights), None, replacement=replacement)
    whole = epoch_of(drawn, seed, epoch)
    asked = data.draw(st.lists(st.integers(0, drawn.positions - 1), max_size=20))
    again = Weighted(np.asarray(weights), None, replacement=replacement)
    assert again.order(seed, epoch)[asked].tolist() == [whole[k] for k in asked]
    assert all(weights[record] > 0 for record in whole)


@given(WEIGHTS, SEEDS, EPOCHS)
def test_without_replacement_each_comes_once_at_most(
    weights: list[float], seed: int, epoch: int
) -> None:
    drawn = Weighted(np.asarray(weights), None, replacement=False)
    assert sorted(epoch_of(drawn, seed, epoch)) == [i for i, w in enumerate(weights) if w > 0]


def test_records_are_drawn_in_proportion_to_their_weights() -> None:
    weights = np.asarray([1.0, 0.0, 2.0, 5.0])
    counts = Counter(epoch_of(Weighted(weights, 80_000, replacement=True)))
    assert set(counts) == {0, 2, 3}
    for record, count in counts.items():
        assert abs(count - 10_000 * weights[record]) < 500
    firsts = Counter(
        epoch_of(Weighted(weights, 1, replacement=False), 3, e)[0] for e in range(8_000)
    )
    for record, count in firsts.items():
        assert abs(count - 1_000 * weights[record]) < 200
    pairs = Counter(
        tuple(epoch_of(Weighted(weights, 2, replacement=False), 4, e)) for e in range(8_000)
    )
    assert abs(pairs[(3, 2)] - 8_000 * 5 / 8 * 2 / 3) < 250


def test_epochs_and_seeds_draw_otherwise() -> None:
    drawn = Weighted(np.ones(100), None, replacement=True)
    assert epoch_of(drawn, 1, 0) != epoch_of(drawn, 1, 1) != epoch_of(drawn, 2, 1)


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=150),
    st.one_of(st.none(), st.integers(1, 400)),
    SEEDS,
    EPOCHS,
)
def test_every_class_comes_equally_often_and_in_it_every_record(
    labels: list[int], samples: int | None, seed: int, epoch: int
) -> None:
    drawn = Balanced(read_classes(labels, "labels", len(labels)), samples)
    found = epoch_of(drawn, seed, epoch)
    assert len(found) == (samples or len(labels))
    by_class = Counter(labels[record] for record in found)
    counts = [by_class[label] for label in set(labels)]
    assert max(counts) - min(counts) <= 1
    by_record = Counter(found)
    for label in set(labels):
        times = [by_record[i] for i, other in enumerate(labels) if other == label]
        assert max(times) - min(times) <= 1


def test_which_records_come_more_often_varies_with_the_epoch() -> None:
    drawn = Balanced(np.asarray([0] * 90 + [1] * 10))
    left_out = [set(range(90)) - set(epoch_of(drawn, 0, epoch)) for epoch in range(20)]
    assert all(len(few) == 40 for few in left_out) and not set.intersection(*left_out)


@given(st.integers(1, 300), st.integers(1, 900), SEEDS, EPOCHS)
def test_shuffles_follow_each_other(size: int, samples: int, seed: int, epoch: int) -> None:
    found = epoch_of(Repeated(size, samples), seed, epoch)
    for start in range(0, samples, size):
        assert len(set(part := found[start : start + size])) == len(part)
    assert found[:size] == order(seed, epoch, size)[range(min(size, samples))].tolist()


def test_in_order_is_the_users_order() -> None:
    assert epoch_of(InOrder(range(5))) == [0, 1, 2, 3, 4]
    names = [7, 3, 9]
    assert [names[k] for k in epoch_of(InOrder(names))] == [3, 7, 9]
    assert epoch_of(FirstPositions(InOrder(range(5)), 4)) == [0, 1, 2, 3]


def test_draws_never_change_between_releases() -> None:
    """Checkpoints hold a position; what is drawn there is a promise."""
    weights = np.asarray([1.0, 2.0, 3.0, 4.0, 0.0, 2.0])
    assert epoch_of(Weighted(weights, 8, replacement=True), 7, 3) == [5, 5, 3, 2, 3, 3, 3, 5]
    assert epoch_of(Weighted(weights, None, replacement=False), 7, 3) == [3, 2, 5, 1, 0]
    assert epoch_of(Balanced(np.asarray([0, 0, 1, 1, 1, 2]), 8), 7, 3) == [4, 5, 1, 2, 5, 0, 1, 3]


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ([1.0, 2.0], "weights has 2, but data has 3 records"),
        (torch.ones(3, 1), r"weights has the shape \(3, 1\)"),
        ([1.0, float("nan"), 1.0], "weights of record 1 is nan"),
        ([1.0, 1.0, -2.0], "weights of record 2 is -2.0; a weight is 0 or more"),
        ([0, 0, 0], "all 0, so nothing can be drawn"),
        (["a", "b", "c"], "are not numbers"),
    ],
)
def test_weights_that_are_none_are_refused(weights: Any, says: str) -> None:
    with pytest.raises(TaskError, match=says):
        read_weights(weights, "weights", 3)


def test_labels_of_any_kind_are_classes() -> None:
    assert read_classes(["b", "a", "b"], "labels", 3).tolist() == [1, 0, 1]
    assert read_classes(torch.tensor([9, 9, 2]), "labels", 3).tolist() == [1, 1, 0]
    with pytest.raises(TaskError, match="labels has 2, but data has 3 records"):
        read_classes([1, 2], "labels", 3)
    with pytest.raises(TaskError, match="of several kinds"):
        read_classes([1, None, 2], "labels", 3)


# ---- samplers that somebody wrote


class Own:
    def __init__(self, *given: Any) -> None:
        self.given, self.calls = given, 0
        self.epoch = 0

    def __iter__(self) -> Iterator[Any]:
        self.calls += 1
        return iter(self.given)


class Mixed(Own):
    def __iter__(self) -> Iterator[Any]:
        found = torch.randperm(20).tolist()
        random.shuffle(found)
        return iter(found + np.random.randint(0, 20, 3).tolist())


class Follows(Own):
    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return iter([self.epoch % 20, 1])


def test_a_sampler_draws_from_generators_that_are_seeded_for_the_epoch() -> None:
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # type: ignore[index]
    first, second = OwnSampler(Mixed(), 20, 5), OwnSampler(Mixed(), 20, 5)
    assert first.positions == 23
    for epoch in (3, 0, 1):  # in any order
        torch.rand(epoch)
        assert epoch_of(first, 5, epoch) == epoch_of(second, 5, epoch)
        assert first.digest(5, epoch) == second.digest(5, epoch)
    assert epoch_of(first, 5, 0) != epoch_of(first, 5, 1) != epoch_of(first, 6, 1)
    torch.set_rng_state(before[0])
    assert np.random.get_state()[1].tolist() == before[1] and random.getstate() == before[2]  # type: ignore[index]


def test_a_sampler_is_told_the_epoch() -> None:
    assert epoch_of(OwnSampler(Follows(), 20, 0), 0, 7) == [7, 1]
    assert epoch_of(OwnSampler([3, torch.tensor(2), np.int64(3)], 20, 0), 0, 7) == [3, 2, 3]


class Counting(Own):
    def __iter__(self) -> Iterator[Any]:
        self.calls += 1
        return iter([self.calls % 20])


class Private(Own):
    def __iter__(self) -> Iterator[Any]:
        self.generator = getattr(self, "generator", random.Random(3))
        return iter([self.generator.randrange(20) for _ in range(30)])


class Shrinking(Follows):
    def __iter__(self) -> Iterator[Any]:
        return iter(range(20 - self.epoch))


class Failing(Own):
    def __iter__(self) -> Iterator[Any]:
        raise KeyError("lost")


class Endless(Own):
    def __iter__(self) -> Iterator[Any]:
        while True:
            yield 1


@pytest.mark.parametrize(
    ("sampler", "says"),
    [
        (Own(), "Own gave no records for epoch 0"),
        (Own(1, 20), "gave 20 at position 1 of epoch 0, but records are numbered from 0 to 19"),
        (Own(-1), "gave -1 at position 0"),
        (Own([1, 2]), r"it gives lists \(batches are cut by train.batch\)"),
        (Own("a"), "it gives str"),
        (Own(1.5), "it gives float"),
        (Counting(), "Counting gave another list of records when it was asked again"),
        (Private(), "Private gave another list"),
        (Failing(), r"Failing failed in epoch 0.\n(.|\n)*lost"),
        (Endless(), "may never end"),
        (Shrinking(), "gave 18 records for epoch 2, and 20 for epoch 0"),
    ],
)
def test_samplers_that_nobody_can_follow_are_refused(sampler: Any, says: str) -> None:
    with pytest.raises(TaskError, match=says):
        OwnSampler(sampler, 20, 0).order(0, 2)
