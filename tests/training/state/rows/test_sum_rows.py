"""Positions are added in their order, and rows of two sides only where both have one."""

from collections.abc import Sequence

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from manyhands.training.state.rows.sum_rows import GradientRows, merge_rows, sum_positions
from tests.training.state.rows.plain_torch import same_bits

FEW = st.sampled_from([-5, -1, 0, 3, 2**62, -(2**63)])
VALUES = [0.0, -0.0, 1.0, 1e-8, -1.0, 3e7, 0.1]


def by_hand(ids: Sequence[int], grads: Tensor) -> dict[int, Tensor]:
    found: dict[int, Tensor] = {}
    for id_, gradient in zip(ids, grads, strict=True):
        found[id_] = found[id_] + gradient if id_ in found else gradient.clone()
    return found


def is_by_hand(ours: GradientRows, expected: dict[int, Tensor]) -> None:
    assert ours.ids.tolist() == sorted(expected)
    for id_, row in zip(ours.ids.tolist(), ours.rows, strict=True):
        assert same_bits(row, expected[id_]), id_


def rows(count: int, dim: int, seed: int) -> Tensor:
    made = np.random.default_rng(seed)
    return torch.from_numpy(made.choice(np.array(VALUES, np.float32), (count, dim)))


@settings(max_examples=200, deadline=None)
@given(st.lists(FEW, max_size=40), st.integers(1, 35), st.integers(0, 999))
def test_duplicates_are_added_in_the_order_of_positions(
    ids: list[int], dim: int, seed: int
) -> None:
    grads = rows(len(ids), dim, seed)
    is_by_hand(sum_positions(np.array(ids, np.int64), grads), by_hand(ids, grads))


def test_many_positions() -> None:
    made = np.random.default_rng(0)
    ids = made.zipf(1.2, 20_000) % 3000
    grads = torch.from_numpy(made.standard_normal((20_000, 16)).astype(np.float32))
    is_by_hand(sum_positions(ids, grads), by_hand(ids.tolist(), grads))


@settings(max_examples=200, deadline=None)
@given(st.sets(FEW), st.sets(FEW), st.integers(1, 20), st.integers(0, 999))
def test_what_one_side_has_goes_on_unchanged(
    left: set[int], right: set[int], dim: int, seed: int
) -> None:
    sides = [
        sum_positions(np.array(sorted(ids), np.int64), rows(len(ids), dim, seed + k))
        for k, ids in enumerate((left, right))
    ]
    kept = [side.rows.clone() for side in sides]
    ids = [id_ for side in sides for id_ in side.ids.tolist()]
    is_by_hand(merge_rows(*sides), by_hand(ids, torch.cat(kept)))
    for side, before in zip(sides, kept, strict=True):
        assert same_bits(side.rows, before)
