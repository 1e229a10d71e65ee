"""What plain torch does with sparse gradients, in one process and one thread: the reference."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from manyhands.training.state.rows import row_optimizers as ours

o: Any = torch.optim

Step = Callable[[Tensor, dict[str, Tensor], Tensor, Tensor, int], None]
"""(weights, state, indices, gradients, step): changes those rows."""


def rowwise_adagrad(w: Tensor, state: dict[str, Tensor], at: Tensor, g: Tensor, step: int) -> None:
    """Row by row; a row's squares are added sixteen to sixteen, then halves to halves."""
    for row, gradient in zip(at.tolist(), g, strict=True):
        squares = torch.zeros(-(-len(gradient) // 16) * 16)
        squares[: len(gradient)] = gradient * gradient
        total = squares.view(-1, 16)[0].clone()
        for block in squares.view(-1, 16)[1:]:
            total += block
        for half in (8, 4, 2, 1):
            total = total[:half] + total[half:]
        state["sum"][row] += total / len(gradient)
        moved = gradient / (state["sum"][row].expand(len(gradient)).sqrt() + 1e-10)
        w[row].add_(moved, alpha=-0.05)


def ftrl(w: Tensor, state: dict[str, Tensor], at: Tensor, g: Tensor, step: int) -> None:
    lr, beta, l1, l2 = 0.05, 1.0, 0.1, 0.2
    z, n = state["z"][at], state["n"][at]
    after = n + g * g
    z = z + g - (after.sqrt() - n.sqrt()) / lr * w[at]
    moved = (z.sign() * l1 - z) / ((after.sqrt() + beta) / lr + l2)
    w[at] = torch.where(z.abs() <= l1, torch.zeros(()), moved)
    state["z"][at], state["n"][at] = z, after


class Reference:
    """A table of few ids, of which all rows are there, and torch's optimizer for it."""

    def __init__(self, kind: str, weights: Tensor) -> None:
        self.first, self.kind = weights.clone(), kind
        self.weights, self.steps = nn.Parameter(weights.clone()), 0
        self.optimizer = TORCH[kind](self.weights) if kind in TORCH else None
        self.state: dict[str, Tensor] = {}
        for name, lane in OURS[kind].lanes.items():
            columns = weights.shape[1] if lane.per_element else 1
            self.state[name] = torch.full((len(weights), columns), lane.initial)

    def step(self, at: list[int], grads: Tensor) -> None:
        self.steps += 1
        indices = torch.tensor(at, dtype=torch.int64)
        if self.optimizer is None:
            with torch.no_grad():
                PLAIN[self.kind](self.weights, self.state, indices, grads, self.steps)
            return
        shape = tuple(self.weights.shape)
        with torch.sparse.check_sparse_tensor_invariants():
            self.weights.grad = torch.sparse_coo_tensor(indices[None], grads, shape).coalesce()
            self.optimizer.step()
        kept = self.optimizer.state.get(self.weights, {})
        self.state = {name: kept[name] for name in self.state}

    def begin_anew(self, row: int) -> None:
        with torch.no_grad():
            self.weights[row] = self.first[row]
        for name, lane in OURS[self.kind].lanes.items():
            self.state[name][row] = lane.initial


OURS: dict[str, ours.RowOptimizer] = {
    "sgd": ours.row_optimizer("sgd", lr=0.05),
    "adagrad": ours.row_optimizer("adagrad", lr=0.05, lr_decay=0.1, initial_accumulator_value=0.1),
    "adam": ours.row_optimizer("adam", lr=0.05, betas=(0.8, 0.95)),
    "rowwise_adagrad": ours.row_optimizer("rowwise_adagrad", lr=0.05),
    "ftrl": ours.row_optimizer("ftrl", l1=0.1, l2=0.2),
}
TORCH: dict[str, Callable[[nn.Parameter], Any]] = {
    "sgd": lambda w: o.SGD([w], lr=0.05),
    "adagrad": lambda w: o.Adagrad([w], lr=0.05, lr_decay=0.1, initial_accumulator_value=0.1),
    "adam": lambda w: o.SparseAdam([w], lr=0.05, betas=(0.8, 0.95)),
}
PLAIN: dict[str, Step] = {"rowwise_adagrad": rowwise_adagrad, "ftrl": ftrl}


def same_bits(left: Tensor, right: Tensor) -> bool:
    a, b = (np.ascontiguousarray(t.detach().numpy()) for t in (left, right))
    return a.shape == b.shape and a.tobytes() == b.tobytes()
