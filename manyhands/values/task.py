# SPDX-License-Identifier: Apache-2.0
"""What a user brings: model, loss, data, optimizer, scores. Plain PyTorch, no base class."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from manyhands.values.errors import TaskError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

    Loss = Tensor | tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model, how it learns and how it is scored. The way of training is not in here."""

    model: "Callable[[], Module] | Module"
    """Builds the module. A module itself is taken as it is, with its weights."""

    loss: "Callable[[Module, Any], Loss] | None" = None
    """`loss(model, batch)`: a mean over the batch's records, or `(mean, weight)` where the mean is
    over something else (tokens, say), or either with a dict of numbers to log at the end."""

    optimizer: "Callable[[Module], Optimizer] | None" = None
    """`optimizer(model)`: any optimizer, any groups."""

    schedule: "Callable[[Optimizer], Any] | None" = None
    """`schedule(optimizer)`: a learning-rate scheduler, stepped once per optimizer step."""

    data: Any = None
    """A dict of tensors or arrays with one row per record, a map-style Dataset, or a prepared
    folder (its path, or `mh.prepared(...)`)."""

    held_out: Any = None
    """Likewise, for scores; or a fraction of `data`, set aside by a fixed shuffle."""

    collate: Callable[[list[Any]], Any] | None = None
    """`collate(records)`: the list of a micro-batch's records (of `data` and of `held_out`) → a
    batch. Left out: as torch's DataLoader does by default."""

    predict: "Callable[[Module, Any], tuple[Tensor, Tensor]] | None" = None
    """`predict(model, batch)`: predictions and targets, one row per record."""

    scores: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Name → torchmetrics metric, or a function over all predictions and targets."""

    # Models that are not trained by gradients (k-means, EM) will give `contribute` and `apply`
    # here in place of `loss` and `optimizer`: the sum between them is the same canonical sum.

    def __post_init__(self) -> None:
        for name in ("model", "loss", "optimizer"):
            if not callable(getattr(self, name)):
                given = getattr(self, name)
                what = "is missing" if given is None else f"is {type(given).__name__}"
                raise TaskError(f"Task: {name} {what}; give a function. See docs/task.md.")
        for name in ("schedule", "predict", "collate"):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                raise TaskError(f"Task: {name} is not a function. See docs/task.md.")
        if self.data is None:
            raise TaskError(
                "Task: data is missing; give a dict of tensors, a Dataset or a prepared folder."
            )
        if self.scores and self.predict is None:
            raise TaskError(
                "Task: scores need predict=lambda model, batch: (predictions, targets)."
            )
        if "loss" in self.scores:
            raise TaskError("Task: a score cannot be called 'loss'; that one is always there.")
        for name, score in self.scores.items():
            if not callable(score):
                raise TaskError(
                    f"Task: score '{name}' is neither a torchmetrics metric nor a function."
                )
        if isinstance(self.held_out, (int, float)) and not 0 < self.held_out < 1:
            raise TaskError(
                f"Task: held_out = {self.held_out} is not a fraction between 0 and 1; "
                "leave it out to hold out nothing."
            )
