# SPDX-License-Identifier: Apache-2.0
"""self.log: what training_step logs are numbers beside the loss, what validation_step logs are
scores.

A score is put together from batches as Lightning does it: numbers by their mean, weighted by the
size of the batch, or by their sum, largest or smallest; torchmetrics objects by their states. Each
batch starts with metrics that have seen nothing, so nothing is left in a worker.
"""

import copy
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torchmetrics import Metric as TorchMetric

from manyhands.values.errors import TaskError

REDUCTIONS = {"mean": "sum", "sum": "sum", "max": "max", "min": "min"}
"""How numbers of batches are put together → how torchmetrics calls what is done for it."""

MERGEABLE = {"dim_zero_sum", "dim_zero_max", "dim_zero_min", "dim_zero_cat"}

_SHOWN = frozenset(
    [
        "prog_bar",
        "logger",
        "on_step",
        "on_epoch",
        "enable_graph",
        "sync_dist",
        "sync_dist_group",
        "add_dataloader_idx",
        "metric_attribute",
        "rank_zero_only",
    ]
)
"""Options of self.log that say where a number is shown."""


class LogRecord:
    """What was logged in one call of a step."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch
        self.values: dict[str, Any] = {}
        """Numbers, as tensors; or torchmetrics objects."""
        self.how: dict[str, tuple[str, float]] = {}
        """Of numbers: how batches are put together, and how much this one counts."""

    def log(self, name: str, value: Any, *shown: Any, **options: Any) -> None:
        if isinstance(value, Mapping):
            raise TaskError(f"self.log('{name}', a dict): use self.log_dict.")
        reduce_fx = options.pop("reduce_fx", "mean")
        size = options.pop("batch_size", None)
        if unknown := options.keys() - _SHOWN:
            raise TaskError(f"self.log('{name}', {min(unknown)}=...): there is no such option.")
        how = getattr(reduce_fx, "__name__", reduce_fx)
        if how not in REDUCTIONS:
            raise TaskError(
                f"self.log('{name}', reduce_fx={how}): batches can be put together by mean, sum, "
                "max or min; anything else by a torchmetrics object that is logged itself."
            )
        if not isinstance(value, TorchMetric):
            value = value.detach() if isinstance(value, Tensor) else torch.tensor(value)
            if value.numel() != 1:
                raise TaskError(f"self.log('{name}', ...): {tuple(value.shape)} is no number.")
        self.values[name] = value
        self.how[name] = (str(how), float(batch_size_of(self.batch) if size is None else size))

    def keep(self) -> None:
        """Metrics as they are now, without the graph of what they were shown."""
        for name, value in self.values.items():
            if isinstance(value, TorchMetric):
                for part in value.modules():
                    vars(part).update({n: _detached(v) for n, v in vars(part).items()})
                self.values[name] = copy.deepcopy(value)

    def numbers(self) -> dict[str, float]:
        """All as numbers: a torchmetrics object by its value for this batch."""
        found = {
            n: v.compute() if isinstance(v, TorchMetric) else v for n, v in self.values.items()
        }
        return {n: float(v) for n, v in found.items() if n != "loss"}


def _detached(value: Any) -> Any:
    if isinstance(value, list):
        return [_detached(each) for each in value]
    return value.detach() if isinstance(value, Tensor) else value


@contextmanager
def logging(module: Any, batch: Any) -> Generator[LogRecord]:
    """`self.log` and `self.log_dict` of the module are noted. Its metrics have seen nothing before,
    and are left as they were."""
    metrics = [part for part in module.modules() if isinstance(part, TorchMetric)]
    before = [dict(vars(metric)) for metric in metrics]
    for metric in metrics:
        metric.reset()
    record = LogRecord(batch)
    object.__setattr__(module, "log", record.log)  # log_dict calls it
    try:
        yield record
        record.keep()
    finally:
        object.__delattr__(module, "log")
        for metric, attributes in zip(metrics, before, strict=True):
            vars(metric).clear()
            vars(metric).update(attributes)


def batch_size_of(batch: Any) -> int:
    """As Lightning finds it: rows of the first tensor."""
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.dim() else 1
    parts = batch.values() if isinstance(batch, Mapping) else batch
    if isinstance(parts, Sequence | type({}.values())) and not isinstance(parts, str):
        for part in parts:
            if size := batch_size_of(part):
                return size
    return 0


_noted: list[tuple[Module, LogRecord]] = []
"""What validation_step logged for the batch that this process is scoring."""


def note(module: Module, record: LogRecord) -> None:
    _noted[:] = [(module, record)]


def noted(module: Module, batch: Any) -> bool:
    return bool(_noted) and _noted[0][0] is module and _noted[0][1].batch is batch


class LoggedScore(TorchMetric):
    """A score that validation_step logs under a name. Its `update` finds what was noted for the
    batch that is scored, in this process; its states are merged as any metric's are."""

    full_state_update = False

    def __init__(self, name: str, like: Any, how: str) -> None:
        super().__init__()
        self.logged, self.how = name, how
        self.like = copy.deepcopy(like) if isinstance(like, TorchMetric) else None
        if self.like is None:
            zero = torch.zeros((), dtype=torch.float64)
            first = {"max": zero - torch.inf, "min": zero + torch.inf}.get(how, zero)
            self.add_state("total", first, dist_reduce_fx=REDUCTIONS[how])
            self.add_state("counted", zero.clone(), dist_reduce_fx="sum")
            return
        self.like.reset()
        for state, default in self._states().items():
            kind = getattr(self.like._reductions[state], "__name__", "None")  # pyright: ignore[reportPrivateUsage]
            if kind not in MERGEABLE:
                raise TaskError(
                    f"self.log('{name}', {type(like).__name__}): what it keeps ('{state}') cannot "
                    f"be put together from batches ({kind}). Log its number instead."
                )
            self.add_state(f"of_{state}", default, dist_reduce_fx=kind.removeprefix("dim_zero_"))
        if not self._states():
            raise TaskError(
                f"self.log('{name}', {type(like).__name__}): it keeps its states in other metrics. "
                "Log those, or its number."
            )

    def _states(self) -> dict[str, Any]:
        assert self.like is not None
        return copy.deepcopy(self.like._defaults)  # pyright: ignore[reportPrivateUsage]

    def update(self, *_: Any) -> None:
        record = _noted[0][1]
        if self.logged not in record.values:
            raise TaskError(
                f"validation_step did not log '{self.logged}' for a batch; it must log the same "
                "names for every batch."
            )
        value = record.values[self.logged]
        if self.like is not None:
            for state in self._states():
                setattr(self, f"of_{state}", copy.deepcopy(getattr(value, state)))
            return
        size = record.how[self.logged][1]
        number = value.double().reshape(())
        self.total = number * size if self.how == "mean" else number
        self.counted = torch.tensor(size, dtype=torch.float64)

    def compute(self) -> Any:
        if self.like is None:
            total: Any = self.total
            return total / self.counted if self.how == "mean" else total
        whole: Any = copy.deepcopy(self.like)
        for state in self._states():
            setattr(whole, state, getattr(self, f"of_{state}"))
        whole._update_count = 1
        whole._to_sync = whole.sync_on_compute = False
        return whole.compute()


def scores_of(record: LogRecord) -> dict[str, LoggedScore]:
    """A score for each name that was logged ("loss" is always there)."""
    return {
        name: LoggedScore(name, value, record.how[name][0])
        for name, value in record.values.items()
        if name != "loss"
    }
