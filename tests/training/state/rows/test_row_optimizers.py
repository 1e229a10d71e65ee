"""Rows are updated as torch updates them, to the bit, in whatever company."""

import os
import subprocess
import sys
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from manyhands.training.state.rows.row_optimizers import (
    block_rows,
    padded_columns,
    padded_rows,
    row_optimizer,
    row_optimizer_like,
)
from manyhands.values.errors import OptimizerRefused
from tests.training.state.rows.plain_torch import OURS, Reference, same_bits

o: Any = torch.optim


def padded(rows: Tensor, count: int, width: int) -> Tensor:
    whole = torch.full((count, width), 7.0)
    whole[:, rows.shape[1] :] = 0
    whole[: len(rows), : rows.shape[1]] = rows
    return whole


class Block:
    """Rows as the store gathers them."""

    def __init__(self, kind: str, weights: Tensor) -> None:
        self.optimizer, (self.rows, self.dim) = OURS[kind], weights.shape
        self.width = padded_columns(self.dim)
        self.count = padded_rows(self.rows, self.width)
        self.weights = padded(weights, self.count, self.width)
        self.state = {
            name: torch.full((self.count, self.width if lane.per_element else 1), lane.initial)
            for name, lane in self.optimizer.lanes.items()
        }

    def step(self, at: list[int], grads: Tensor, step: int) -> None:
        """Of some of them, in this order, as many at a time as may be."""
        most = block_rows(self.width)
        for first in range(0, len(at), most):
            rows = torch.tensor(at[first : first + most])
            count = padded_rows(len(rows), self.width)
            weights = padded(self.weights[rows], count, self.width)
            state = {k: padded(lane[rows], count, lane.shape[1]) for k, lane in self.state.items()}
            gradient = padded(grads[first : first + most], count, self.width)
            self.optimizer.update(weights, state, gradient, step, self.dim)
            self.weights[rows] = weights[: len(rows)]
            for name, lane in state.items():
                self.state[name][rows] = lane[: len(rows)]


def made_up(rows: int, dim: int, seed: int) -> Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(rows, dim, generator=made) * torch.randn(rows, 1, generator=made).exp()


def takes_torchs_steps(kind: str, dim: int, rows: int, steps: int, seed: int) -> None:
    torch.set_num_threads(1)
    first = made_up(rows, dim, seed)
    reference, block = Reference(kind, first), Block(kind, first)
    chosen = torch.Generator().manual_seed(seed)
    for step in range(1, steps + 1):
        at = torch.randperm(rows, generator=chosen)[: 1 + (seed + step * 7) % rows].tolist()
        grads = made_up(len(at), dim, seed + step)
        reference.step(at, grads)
        block.step(at, grads, step)
    assert same_bits(block.weights[:rows, :dim], reference.weights)
    for name, lane in block.state.items():
        assert same_bits(lane[:rows, : reference.state[name].shape[1]], reference.state[name])


@pytest.mark.parametrize("kind", OURS)
@settings(max_examples=25, deadline=None)
@given(dim=st.integers(1, 70), rows=st.integers(1, 90), seed=st.integers(0, 99))
def test_the_bits_are_torchs(kind: str, dim: int, rows: int, seed: int) -> None:
    takes_torchs_steps(kind, dim, rows, 4, seed)


@pytest.mark.parametrize("kind", ["sgd", "adagrad", "adam", "ftrl"])
def test_the_bits_are_torchs_in_many_blocks(kind: str) -> None:
    takes_torchs_steps(kind, 16, 9000, 3, 5)


@pytest.mark.parametrize("kind", OURS)
@settings(max_examples=25, deadline=None)
@given(st.data())
def test_a_row_does_not_depend_on_its_company(kind: str, data: st.DataObject) -> None:
    dim, rows = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 60))
    first, grads = made_up(rows, dim, 1), made_up(rows, dim, 2)
    whole, some = Block(kind, first), Block(kind, first)
    whole.step(list(range(rows)), grads, 3)
    order = data.draw(st.permutations(range(rows)))
    cuts = sorted(data.draw(st.sets(st.integers(0, rows), max_size=4)) | {0, rows})
    for a, b in pairwise(cuts):
        some.step(order[a:b], grads[order[a:b]], 3)
    assert same_bits(whole.weights[:rows, :dim], some.weights[:rows, :dim])
    for name, lane in whole.state.items():
        columns = min(dim, lane.shape[1])
        assert same_bits(lane[:rows, :columns], some.state[name][:rows, :columns])


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["default", "avx2"])
def test_on_other_processors_too(capability: str) -> None:
    """torch has other kernels for them."""
    code = (
        f"import {__name__} as t\n"
        "for kind in t.OURS:\n"
        "    for dim, rows in [(1, 33), (16, 1), (16, 57), (17, 40), (40, 31)]:\n"
        "        t.takes_torchs_steps(kind, dim, rows, 3, 1)\n"
    )
    env = {**os.environ, "ATEN_CPU_CAPABILITY": capability}
    subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=60)


def test_what_rows_cannot_have_is_refused_by_name() -> None:
    refused: list[tuple[str, Any]] = [
        ("momentum", lambda: row_optimizer("sgd", lr=0.1, momentum=0.9)),
        ("weight_decay", lambda: row_optimizer("adagrad", weight_decay=0.1)),
        ("no optimizer 'lamb'", lambda: row_optimizer("lamb")),
        ("no setting rho", lambda: row_optimizer("adam", rho=1.0)),
        ("AdamW takes no sparse", lambda: row_optimizer_like(o.AdamW, {})),
        ("maximize", lambda: row_optimizer_like(o.SGD, {"lr": 0.1, "maximize": True})),
    ]
    for match, make in refused:
        with pytest.raises(OptimizerRefused, match=match):
            make()


@pytest.mark.parametrize("kind", ["sgd", "adagrad", "adam"])
def test_torchs_own_settings_are_understood(kind: str) -> None:
    reference = Reference(kind, torch.zeros(1, 1))
    assert reference.optimizer is not None
    group = reference.optimizer.param_groups[0]
    assert row_optimizer_like(type(reference.optimizer), group) == OURS[kind]
