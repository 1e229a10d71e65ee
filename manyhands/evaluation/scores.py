# SPDX-License-Identifier: Apache-2.0
"""Scores on held-out records that do not depend on how many workers computed them.

The unit is the batch: its loss, its metric states (or predictions, where a score needs all of
them) are computed by whoever has it, and merged in the order of the batches. Every record is in
exactly one batch. Results travel as plain data, never pickled.
"""

import copy
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.nn import Module

from manyhands.values.errors import TaskError
from manyhands.values.forked_children import one_process
from manyhands.values.half_precision import autocast

Metric = Any
"""A torchmetrics.Metric. The package takes a second to import, so it is not imported here: a task
that uses it has imported it already."""


class ScoreArray(msgspec.Struct, frozen=True, array_like=True):
    """A tensor as data."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class BatchResult(msgspec.Struct, frozen=True, array_like=True):
    index: int
    records: int
    loss: float
    weight: float
    states: dict[str, dict[str, list[ScoreArray]]]
    """score → state → one tensor, or the tensors of a list state"""
    outputs: tuple[ScoreArray, ScoreArray] | None
    """Predictions and targets, when some score wants to see all of them."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """How a task is scored."""

    loss: Callable[[Module, Any], Any] | None
    """None: there is none that all records have (several optimizers, each with its own)."""
    read_loss: Callable[[Any], tuple[Tensor, float | None, dict[str, float]]]
    predict: Callable[[Module, Any], tuple[Tensor, Tensor]] | None
    scores: Mapping[str, Any]
    precision: str

    def metrics(self) -> dict[str, Metric]:
        """The metrics whose states can be merged."""
        return {n: s for n, s in flat_scores(self.scores).items() if _mergeable(s)}

    def functions(self) -> dict[str, Any]:
        """Scores that need all predictions."""
        return {n: s for n, s in flat_scores(self.scores).items() if not _mergeable(s)}


def measure(
    evaluation: Evaluation, model: Module, batches: Iterable[tuple[int, int, Any]]
) -> list[BatchResult]:
    """Results of these held-out batches. The model is left in training mode as it was."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    device = next((p.device.type for p in model.parameters()), "cpu")
    half = autocast(device, evaluation.precision)
    try:
        with one_process(), torch.no_grad(), half:
            return [_measure_one(evaluation, model, *batch) for batch in batches]
    finally:
        for module, training in modes.items():
            module.training = training


def _measure_one(
    evaluation: Evaluation, model: Module, index: int, records: int, batch: Any
) -> BatchResult:
    value, weight = math.nan, None
    if evaluation.loss is not None:
        loss, weight, _ = evaluation.read_loss(evaluation.loss(model, batch))
        value = loss.item()
    states: dict[str, dict[str, list[ScoreArray]]] = {}
    outputs = None
    if evaluation.scores and evaluation.predict is not None:
        made: Any = evaluation.predict(model, batch)
        if not isinstance(made, tuple | list) or len(made) != 2:
            raise TaskError("predict must return two tensors: (predictions, targets).")
        predictions, targets = (_rows(torch.as_tensor(t).detach().cpu(), records) for t in made)
        for what, tensor in (("predictions", predictions), ("targets", targets)):
            if tensor.dim() == 0:
                raise TaskError(
                    f"predict returned a single number as {what} of {records} records; it must "
                    "return one row per record."
                )
        for name, metric in evaluation.metrics().items():
            states[name] = _states(name, metric, predictions, targets)
        if evaluation.functions():
            outputs = (to_array(predictions), to_array(targets))
    counted = float(records) if weight is None else weight
    return BatchResult(index, records, value, counted, states, outputs)


def combine(evaluation: Evaluation, results: Sequence[BatchResult]) -> dict[str, float]:
    """The scores, from all batches' results."""
    ordered = sorted(results, key=lambda r: r.index)
    total = sum(r.weight for r in ordered)
    scores: dict[str, float] = {}
    if evaluation.loss is not None:
        scores["loss"] = sum(r.loss * r.weight for r in ordered) / total if total else math.nan
    for name, metric in evaluation.metrics().items():
        scores.update(_numbers(name, _merged(metric, [r.states[name] for r in ordered])))
    functions = evaluation.functions()
    if functions:
        outputs = [r.outputs for r in ordered if r.outputs is not None]
        pairs = [(from_array(p), from_array(t)) for p, t in outputs]
        for name, function in functions.items():
            scores.update(_numbers(name, _called(function, pairs)))
    return scores


def _called(function: Any, pairs: Sequence[tuple[Tensor, Tensor]]) -> Any:
    if _is_metric(function):  # its states cannot be merged: show it the batches in order
        metric = _blank(function)
        for predictions, targets in pairs:
            metric.update(predictions, targets)
        return metric.compute()
    return function(torch.cat([p for p, _ in pairs]), torch.cat([t for _, t in pairs]))


def _blank(metric: Metric) -> Any:
    """One like it that has seen nothing. Left to itself it would ask all members of a torch group
    for theirs, and wait for them for ever."""
    blank: Any = copy.deepcopy(metric)
    blank.reset()
    blank._to_sync = blank.sync_on_compute = blank.dist_sync_on_step = False
    return blank


def _rows(tensor: Tensor, records: int) -> Tensor:
    """One row per record: `squeeze()` takes away the only one of a batch of one."""
    return tensor.view(1) if tensor.dim() == 0 and records == 1 else tensor


def _states(
    score: str, metric: Metric, predictions: Tensor, targets: Tensor
) -> dict[str, list[ScoreArray]]:
    fresh = _blank(metric)
    fresh.update(predictions, targets)
    found: dict[str, list[ScoreArray]] = {}
    for name, value in fresh.metric_state.items():
        tensors: list[Any] = value if isinstance(value, list) else [value]
        if strange := [t for t in tensors if not isinstance(t, Tensor) or t.is_sparse]:
            raise TaskError(
                f"the score '{score}' keeps {type(strange[0]).__name__} in its state '{name}', and "
                "only dense tensors can be sent to the worker that puts all of them together. Give "
                "a function of all predictions and targets instead."
            )
        found[name] = [to_array(t) for t in tensors]
    return found


def _merged(metric: Metric, states: Sequence[dict[str, list[ScoreArray]]]) -> Any:
    """The metric's value after its states were reduced, first batch first."""
    merged = _blank(metric)
    reductions: Any = merged._reductions  # pyright: ignore[reportPrivateUsage]
    for name, reduction in reductions.items():
        parts = [[from_array(a) for a in s[name]] for s in states]
        if reduction.__name__ == "dim_zero_cat":
            value: Any = [t for part in parts for t in part]
        else:
            value = parts[0][0]
            for (tensor,) in parts[1:]:
                value = reduction(torch.stack([value, tensor]))
        setattr(merged, name, value)
    merged._update_count = len(states)  # pyright: ignore[reportPrivateUsage]
    return merged.compute()


def _mergeable(score: Any) -> bool:
    """Whether the states of this metric after single batches can be put together."""
    if not _is_metric(score):
        return False
    names = {"dim_zero_sum", "dim_zero_max", "dim_zero_min", "dim_zero_cat"}
    reductions: Any = score._reductions
    return all(getattr(r, "__name__", None) in names for r in reductions.values())


def _torchmetrics() -> ModuleType | None:
    return sys.modules.get("torchmetrics")


def _is_metric(score: Any) -> bool:
    package: Any = _torchmetrics()
    return package is not None and isinstance(score, package.Metric)


def flat_scores(scores: Mapping[str, Any]) -> dict[str, Any]:
    """Scores with collections of metrics taken apart."""
    flat: dict[str, Any] = {}
    for name, score in scores.items():
        package: Any = _torchmetrics()
        if package is not None and isinstance(score, package.MetricCollection):
            flat.update({f"{name}/{k}": m for k, m in score.items(copy_state=True)})
        else:
            flat[name] = score
    return flat


def _numbers(name: str, value: Any) -> dict[str, float]:
    """A score's value as numbers: one, or one per entry of a dict or vector."""
    if isinstance(value, Mapping):
        return {k: v for key, x in value.items() for k, v in _numbers(f"{name}/{key}", x).items()}
    if isinstance(value, Tensor) and value.numel() != 1:
        return {f"{name}/{i}": float(x) for i, x in enumerate(value.flatten())}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return {k: v for i, x in enumerate(value) for k, v in _numbers(f"{name}/{i}", x).items()}
    return {name: float(value)}


def to_array(tensor: Tensor) -> ScoreArray:
    """The values, whatever the strides. (`contiguous()` keeps those of a tensor of one element, and
    what is to be looked at as bytes must have none.)"""
    raw = torch.empty(tensor.shape, dtype=tensor.dtype)
    raw.copy_(tensor.detach())
    name = str(raw.dtype).removeprefix("torch.")
    return ScoreArray(name, tuple(raw.shape), raw.view(-1).view(torch.uint8).numpy().tobytes())


def from_array(array: ScoreArray) -> Tensor:
    dtype = getattr(torch, array.dtype)
    if not array.data:
        return torch.empty(array.shape, dtype=dtype)
    return torch.frombuffer(bytearray(array.data), dtype=dtype).view(array.shape)


def encode(results: Sequence[BatchResult]) -> bytes:
    return msgspec.msgpack.encode(results)


def decode(parts: Iterable[bytes]) -> list[BatchResult]:
    decoder = msgspec.msgpack.Decoder(list[BatchResult])
    return [result for part in parts for result in decoder.decode(part)]
