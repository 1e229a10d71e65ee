# SPDX-License-Identifier: Apache-2.0
"""`mh.Embedding`: a module that looks rows up by id, of any 64 bits, without a row for every id.

It has no parameter. In a run its rows are in the host's memory (tables.py), and what backward finds
for the rows that were looked up is summed and applied by whoever has their buckets. Outside a run,
and before one, every row reads as its first values.
"""

from collections.abc import Mapping
from numbers import Integral
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from manyhands.training.state.rows.row_hash import Ids
from manyhands.training.state.rows.row_init import (
    ConstantInit,
    FirstRows,
    NormalInit,
    RowInit,
    UniformInit,
)
from manyhands.training.state.rows.row_optimizers import RowOptimizer, row_optimizer
from manyhands.training.state.rows.row_store import TableSpec
from manyhands.values.errors import ConfigError, TaskError

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
Init = float | tuple[float, float] | str
_FOLLOWS = 1e-3
"""Stands for a rate that is the task's optimizer's."""


class Rows(Protocol):
    """Where a module's rows are."""

    def look_up(self, ids: Ids) -> Tensor:
        """[ids, dim]; gradients that arrive there are taken note of."""
        ...


class Embedding(Module):
    """A table of rows, looked up by id: any 64-bit number, at most `rows` of them at a time.

    init       first values: a number is the standard deviation of a normal distribution (0: zeros),
               (low, high) a uniform one, "normal" is N(0, 1) as nn.Embedding has it
    optimizer  "adagrad", "rowwise_adagrad", "adam" (as SparseAdam counts), "sgd" or "ftrl"; `lr` is
               its rate (default: that of the task's optimizer, first group, at every step), and
               other names are its settings (`eps=1e-8`, `l1=0.1`)
    admit      an id takes gradients from the step on in which it is seen for the so manieth time
    expire     an id that had no gradient for so many steps is forgotten, and begins anew
    padding_idx
               this id reads as zeros, takes no gradient and has no row. It is an id as it stands:
               -1 is the id -1, not the last row, for rows have no numbers
    """

    def __init__(
        self,
        rows: int,
        dim: int,
        *,
        init: Init = "normal",
        optimizer: str = "adagrad",
        lr: float | None = None,
        admit: int = 1,
        expire: int | None = None,
        padding_idx: int | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        self.padding_idx = _checked(padding_idx, settings)
        self.rows, self.dim, self.admit, self.expire = rows, dim, admit, expire
        self.first, self.follows = row_init(init), lr is None
        self.kind, self.settings = optimizer, {"lr": _FOLLOWS if lr is None else lr, **settings}
        self.spec("", 0)  # these refuse what cannot be, where it was written
        self.row_optimizer()
        self.trained = True
        self._rows: Rows | None = None

    def spec(self, name: str, seed: int) -> TableSpec:
        return TableSpec(
            name=name,
            dim=self.dim,
            capacity=self.rows,
            init=self.first,
            seed=seed,
            admit=self.admit,
            expire=self.expire,
        )

    def row_optimizer(self) -> RowOptimizer:
        return row_optimizer(self.kind, **self.settings)

    def bind(self, rows: Rows | None) -> None:
        """From now on the rows are there."""
        self._rows = rows

    def forward(self, ids: Tensor) -> Tensor:
        flat = _plain_ids(ids)
        found = self._looked_up(flat) if self.padding_idx is None else self._unpadded(flat)
        return found.to(ids.device).view(*ids.shape, self.dim)

    def _looked_up(self, ids: Ids) -> Tensor:
        if self._rows is None:
            return torch.from_numpy(FirstRows(self.first, self.dim, seed=0, table="")(ids))
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.trained):
            return self._rows.look_up(ids)

    def _unpadded(self, ids: Ids) -> Tensor:
        """Only what is no padding is looked up, and so has gradients and rows."""
        there = np.flatnonzero(ids != self.padding_idx)
        if len(there) == len(ids):
            return self._looked_up(ids)
        rows = self._looked_up(ids.take(there))
        return rows.new_zeros(len(ids), self.dim).index_copy(0, torch.from_numpy(there), rows)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """False: its rows stay as they are."""
        self.trained = requires_grad
        return self

    def extra_repr(self) -> str:
        rate = "the task's" if self.follows else self.settings["lr"]
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.rows}, {self.dim}, optimizer={self.kind}, lr={rate}{padding}"


_OF_TORCH = {
    "max_norm": "rows are changed by their optimizer alone. Shorten them where they are used, as "
    "in torch.nn.functional.normalize(rows), or keep an nn.Embedding(max_norm=...)",
    "norm_type": "it belongs to max_norm, which rows do not have",
    "scale_grad_by_freq": "a row's gradient is the sum over the positions that look it up. Divide "
    "by their number in the loss, or keep an nn.Embedding(scale_grad_by_freq=True)",
    "sparse": "gradients are always of rows that were looked up, and nothing else. Leave it out",
    "_weight": "a row's first values follow from its id (init=...). To begin with rows that were "
    "trained, set train.start_from; values that are given are for an nn.Embedding",
    "_freeze": "call requires_grad_(False) on it instead",
    "device": "rows are in the memory of the host. Leave it out",
    "dtype": "rows are float32. Leave it out, and convert what is looked up",
}
"""What nn.Embedding has and rows have not, with what to do."""


def _checked(padding_idx: Any, settings: Mapping[str, Any]) -> int | None:
    for name in settings.keys() & _OF_TORCH.keys():
        raise ConfigError(f"mh.Embedding has no {name}, which nn.Embedding has: {_OF_TORCH[name]}.")
    if padding_idx is None:
        return None
    if isinstance(padding_idx, bool) or not isinstance(padding_idx, Integral):
        raise ConfigError(f"mh.Embedding: padding_idx={padding_idx!r} is no id; ids are integers.")
    if not -(1 << 63) <= int(padding_idx) < 1 << 63:
        raise ConfigError(f"mh.Embedding: padding_idx={padding_idx} does not fit into 64 bits.")
    return int(padding_idx)


def row_init(init: Init) -> RowInit:
    match init:
        case "normal":
            return NormalInit()
        case "zeros":
            return ConstantInit()
        case bool() | str():
            raise ConfigError(
                f"Embedding: init={init!r}; it is a standard deviation (0.01), bounds of a uniform "
                'distribution ((-0.1, 0.1)), "normal" or "zeros".'
            )
        case (low, high):
            return UniformInit(float(low), float(high))
        case 0:
            return ConstantInit()
        case _:
            return NormalInit(float(init))


def _plain_ids(ids: Any) -> Ids:
    if not isinstance(ids, Tensor) or ids.dtype not in INTEGERS:
        kind = str(ids.dtype) if isinstance(ids, Tensor) else type(ids).__name__
        raise TaskError(
            f"mh.Embedding was given ids as {kind}; it takes a tensor of integers (torch.int64)."
        )
    flat = ids.detach().reshape(-1).to("cpu", torch.int64).contiguous()
    return np.ascontiguousarray(flat.numpy())
