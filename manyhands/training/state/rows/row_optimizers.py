# SPDX-License-Identifier: Apache-2.0
"""What a gradient does to a row, and what is kept beside each row for it.

`update` works in place on blocks of rows that were gathered from a table. The bits of a row do not
depend on the other rows of its block: the arithmetic is element by element, blocks are cut so that
no kernel sees a part of its vectors or a second thread (`block_rows`, `QUANTUM`), and what is
summed over a row is summed in an order of ours. Where torch has the optimizer, the bits are those
of torch.optim.SGD, Adagrad and SparseAdam on a coalesced sparse gradient: the same operations in
the same order. Rows without a gradient stay as they are, also their averages.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch
from torch import Tensor

from manyhands.values.errors import OptimizerRefused

QUANTUM = 64
"""Elements: blocks are a multiple of this, or torch computes the last ones by another kernel."""
_ONE_THREAD = 1 << 15
"""Elements: torch shares out larger ones among threads, wherever that cuts."""
LANE = 16
"""Columns are padded to a multiple of this; fewer of them, to a power of two."""
MOST_COLUMNS = 8192

State = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class StateLane:
    """What is kept of each row: as many numbers as it has columns, or one."""

    per_element: bool = True
    initial: float = 0.0


class RowOptimizer(Protocol):
    """Its fields are the hyper-parameters; `dataclasses.replace` changes one while training."""

    @property
    def lanes(self) -> Mapping[str, StateLane]: ...

    def update(self, weights: Tensor, state: State, grads: Tensor, step: int, dim: int) -> None:
        """One step, the `step`-th of the table (from 1), of rows [n, width] of which the first
        `dim` columns count. Changes all but `step` and `dim` in place."""
        ...


def padded_columns(dim: int) -> int:
    return 1 << (dim - 1).bit_length() if dim < LANE else -(-dim // LANE) * LANE


def block_rows(width: int) -> int:
    """How many rows may be updated at once."""
    quantum = QUANTUM // math.gcd(QUANTUM, width)
    return max(1, _ONE_THREAD // width // quantum) * quantum


def padded_rows(rows: int, width: int) -> int:
    quantum = QUANTUM // math.gcd(QUANTUM, width)
    return -(-rows // quantum) * quantum


@dataclass(frozen=True, kw_only=True)
class RowSGD:
    lr: float = 1e-3

    @property
    def lanes(self) -> Mapping[str, StateLane]:
        return {}

    def update(self, weights: Tensor, state: State, grads: Tensor, step: int, dim: int) -> None:
        weights.add_(grads, alpha=-self.lr)


@dataclass(frozen=True, kw_only=True)
class RowAdagrad:
    lr: float = 1e-2
    lr_decay: float = 0.0
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10

    @property
    def lanes(self) -> Mapping[str, StateLane]:
        return {"sum": StateLane(initial=self.initial_accumulator_value)}

    def update(self, weights: Tensor, state: State, grads: Tensor, step: int, dim: int) -> None:
        rate = self.lr / (1 + (step - 1) * self.lr_decay)
        total = state["sum"].add_(grads.pow(2))
        weights.add_(grads.div_(total.sqrt().add_(self.eps)), alpha=-rate)


@dataclass(frozen=True, kw_only=True)
class RowwiseAdagrad:
    """Adagrad with one number per row: the sum of the means of its gradients' squares."""

    lr: float = 1e-2
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10

    @property
    def lanes(self) -> Mapping[str, StateLane]:
        return {"sum": StateLane(per_element=False, initial=self.initial_accumulator_value)}

    def update(self, weights: Tensor, state: State, grads: Tensor, step: int, dim: int) -> None:
        total = state["sum"].add_(sum_of_columns(grads.pow(2)).div_(dim))
        # a copy of its own, and whole: one row is one vector, see above
        roots = total.repeat(1, grads.shape[1]).sqrt_()
        weights.add_(grads.div_(roots.add_(self.eps)), alpha=-self.lr)


def sum_of_columns(rows: Tensor) -> Tensor:
    """[n, width] → [n, 1]: sixteen columns are added to sixteen, and then halves to halves."""
    folded = rows[:, :LANE].clone()
    for start in range(LANE, rows.shape[1], LANE):
        folded.add_(rows[:, start : start + LANE])
    while (half := folded.shape[1] // 2) > 0:
        folded = folded[:, :half] + folded[:, half:]
    return folded


@dataclass(frozen=True, kw_only=True)
class RowAdam:
    """As torch.optim.SparseAdam counts: one counter for the table, and a row that is not touched
    keeps its averages."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    @property
    def lanes(self) -> Mapping[str, StateLane]:
        return {"exp_avg": StateLane(), "exp_avg_sq": StateLane()}

    def update(self, weights: Tensor, state: State, grads: Tensor, step: int, dim: int) -> None:
        beta1, beta2 = self.betas
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        moved = grads.pow(2).sub_(square).mul_(1 - beta2)
        mean.add_(grads.sub_(mean).mul_(1 - beta1))
        square.add_(moved)
        size = self.lr * math.sqrt(1 - beta2**step) / (1 - beta1**step)
        weights.add_(mean.div(square.sqrt().add_(self.eps)).mul_(-size))


@dataclass(frozen=True, kw_only=True)
class RowFTRL:
    """FTRL-proximal (McMahan et al., 2013): per-coordinate rates, and weights that are exactly 0
    while l1 outweighs their gradients."""

    lr: float = 0.05
    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0
    initial_accumulator_value: float = 0.0

    @property
    def lanes(self) -> Mapping[str, StateLane]:
        return {"z": StateLane(), "n": StateLane(initial=self.initial_accumulator_value)}

    def update(self, weights: Tensor, state: State, grads: Tensor, step: int, dim: int) -> None:
        if self.lr == 0:  # as a warm-up may begin
            return
        z, n = state["z"], state["n"]
        before = n.sqrt()
        root = n.add_(grads.pow(2)).sqrt()
        z.add_(grads).sub_((root - before).div_(self.lr).mul_(weights))
        rate = root.add_(self.beta).div_(self.lr).add_(self.l2)
        moved = z.sign().mul_(self.l1).sub_(z).div_(rate)
        weights.copy_(moved.masked_fill_(z.abs() <= self.l1, 0.0))


_KINDS: dict[str, type[Any]] = {
    "sgd": RowSGD,
    "adagrad": RowAdagrad,
    "rowwise_adagrad": RowwiseAdagrad,
    "adam": RowAdam,
    "ftrl": RowFTRL,
}
_LIKE_TORCH: dict[type, type[Any]] = {
    torch.optim.SGD: RowSGD,
    torch.optim.Adagrad: RowAdagrad,
    torch.optim.SparseAdam: RowAdam,
}
_REFUSED = {
    "momentum": "it would go on moving rows that have no gradient",
    "weight_decay": "rows that nobody touches would not decay; torch refuses it for them too",
    "maximize": "negate the loss instead",
    "foreach": "it is another order of operations",
    "fused": "it is another order of operations",
}


def row_optimizer(kind: str, **settings: Any) -> RowOptimizer:
    """By name, with its hyper-parameters; what does not exist for rows is refused by name."""
    if kind not in _KINDS:
        raise OptimizerRefused(
            f"rows of tables have no optimizer '{kind}'; there are {', '.join(_KINDS)}."
        )
    return _build(_KINDS[kind], kind, settings)


def row_optimizer_like(kind: type, settings: Mapping[str, Any]) -> RowOptimizer:
    """What torch's optimizer of this kind and these settings of a group does to sparse rows."""
    if kind not in _LIKE_TORCH:
        raise OptimizerRefused(
            f"{kind.__name__} takes no sparse gradients. Rows of tables are for "
            f"{', '.join(like.__name__ for like in _LIKE_TORCH)}."
        )
    known = {f.name for f in fields(_LIKE_TORCH[kind])}
    ours = {key: value for key, value in settings.items() if key in known or key in _REFUSED}
    return _build(_LIKE_TORCH[kind], kind.__name__, ours)


def _build(made: type[Any], name: str, settings: Mapping[str, Any]) -> RowOptimizer:
    for key, value in settings.items():
        if key in _REFUSED and value:
            raise OptimizerRefused(
                f"{name} with {key}={value} cannot be the optimizer of rows: {_REFUSED[key]}. "
                f"Leave {key} out for this table, or keep the table as a dense parameter."
            )
    for key, value in settings.items():
        numbers = [*value] if isinstance(value, tuple | list) else [value]
        most = 1.0 if key == "betas" else math.inf
        if key not in _REFUSED and not all(0 <= float(n) < most for n in numbers):
            raise OptimizerRefused(f"{name} of rows has {key}={value}, which is out of range.")
    known = {f.name for f in fields(made)}
    unknown = settings.keys() - known - _REFUSED.keys()
    if unknown:
        raise OptimizerRefused(
            f"{name} of rows has no setting {', '.join(sorted(unknown))}; it has "
            f"{', '.join(sorted(known))}."
        )
    return made(**{key: _plain(value) for key, value in settings.items() if key in known})


def _plain(value: Any) -> Any:
    return tuple(float(v) for v in value) if isinstance(value, tuple | list) else float(value)
