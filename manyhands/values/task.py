# SPDX-License-Identifier: Apache-2.0
"""What a user brings: model, loss, data, optimizer, scores. Plain PyTorch, no base class."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from manyhands.values.errors import TaskError
from manyhands.values.task_checks import (
    CALLED,
    answering,
    see_that_data_is_named,
    see_that_it_can_be_called,
    see_that_scores_can_be_called,
)

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

    Loss = Tensor | tuple[Any, ...]
    Losses = Callable[[Module, Any], Loss]
    MakesOptimizer = Callable[[Module], Optimizer]
    MakesSchedule = Callable[[Optimizer], Any]


LONGEST_PERIOD = 10_000
"""Rounds until several optimizers are due in the same way again."""


@dataclass(frozen=True, slots=True)
class BatchLoss:
    """A loss over the whole batch. Called with a batch it is that batch's: records are compared
    with each other and with no others."""

    embed: "Callable[[Module, Any], Any]"
    batch_loss: "Callable[..., Any]"

    def __call__(self, model: "Module", batch: Any) -> Any:
        made = self.embed(model, batch)
        return self.batch_loss(model, *(made if isinstance(made, tuple | list) else (made,)))


@answering
@dataclass(frozen=True, kw_only=True)
class Task:
    """A model, how it learns and how it is scored. The way of training is not in here."""

    model: "Callable[[], Module] | Module"
    """Builds the module. A module itself is taken as it is, with its weights."""

    loss: "Losses | Mapping[str, Losses] | None" = None
    """`loss(model, batch)`: a mean over the batch's records, or `(mean, weight)` where the mean is
    over something else (tokens, say), or either with a dict of numbers to log at the end."""

    embed: "Callable[[Module, Any], Tensor | tuple[Tensor, ...]] | None" = None
    """In place of `loss`, with `batch_loss`. `embed(model, batch)`: one tensor or several, with a
    row for each record."""

    batch_loss: "Callable[..., Loss] | None" = None
    """`batch_loss(model, *embeddings)`: the loss of the whole batch, from the rows of all its
    records; or `(loss, numbers)`."""

    optimizer: "MakesOptimizer | Mapping[str, MakesOptimizer] | None" = None
    """`optimizer(model)`: any optimizer, any groups. Several, each over parameters of its own and
    with a loss of its own (a GAN): a dict, `{"d": ..., "g": ...}`, and `loss` another with the same
    names. In each round they take a step each, in the order of this dict."""

    schedule: "MakesSchedule | Mapping[str, MakesSchedule] | None" = None
    """`schedule(optimizer)`: a learning-rate scheduler. Of several optimizers: a dict, as far as
    they have one."""

    schedule_every: Literal["step", "epoch"] = "step"
    """When it is stepped. (ReduceLROnPlateau: after each evaluation while training.)"""

    every: Mapping[str, int] = field(default_factory=dict[str, int])
    """Of several optimizers: `{"g": 5}` lets g take a step in every fifth round only."""

    offset: Mapping[str, int] = field(default_factory=dict[str, int])
    """And in which of the five, counted from 0."""

    share_batch: bool = True
    """Of several optimizers: those of a round see the same batch; False: each step takes the next
    one."""

    after_step: "Callable[[Module], Any] | None" = None
    """`after_step(model)`: called after each optimizer step, once on every host, without gradients;
    it may write to weights and buffers (clipping, constraints, averages of one's own)."""

    data: Any = None
    """A dict of tensors or arrays with one row per record, a map-style Dataset, a prepared
    folder (its path, or `mh.prepared(...)`), or a stream: whatever yields records, in sequence."""

    held_out: Any = None
    """Likewise, for scores; or a fraction of `data`, set aside by a fixed shuffle."""

    collate: Callable[[list[Any]], Any] | None = None
    """`collate(records)`: the list of a micro-batch's records (of `data` and of `held_out`) → a
    batch. Left out: as torch's DataLoader does by default."""

    sampler: Any = None
    """Which records an epoch visits: a torch Sampler or any iterable of record numbers (run once an
    epoch, under a seed of its own), `mh.balanced(labels)`, or "balanced". Left out: each once."""

    weights: Any = None
    """Instead of a sampler, one number for each record: they are drawn with chances in proportion
    to it, as many as there are."""

    replacement: bool = True
    """Of `weights`: whether a record may be drawn again in the same epoch."""

    predict: "Callable[[Module, Any], tuple[Tensor, Tensor]] | None" = None
    """`predict(model, batch)`: predictions and targets, one row per record."""

    scores: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Name → torchmetrics metric, or a function over all predictions and targets."""

    # Models that are not trained by gradients (k-means, EM) will give `contribute` and `apply`
    # here in place of `loss` and `optimizer`: the sum between them is the same canonical sum.

    def __post_init__(self) -> None:
        for name in CALLED:
            see_that_it_can_be_called(name, getattr(self, name))
        see_that_scores_can_be_called(self.scores)
        see_that_data_is_named("data", self.data)
        see_that_data_is_named("held_out", self.held_out)
        several = isinstance(self.optimizer, Mapping)
        by_batch = self.embed is not None or self.batch_loss is not None
        if by_batch and self.loss is not None:
            raise TaskError(
                "Task: loss and batch_loss are both there. Give loss(model, batch), which sees one "
                "micro-batch, or embed and batch_loss, which sees the whole batch."
            )
        if by_batch and several:
            raise TaskError(
                "Task: batch_loss goes with one optimizer. Several have a loss of their own each, "
                "which sees one micro-batch: loss={...}."
            )
        learns = ("embed", "batch_loss") if by_batch else ("loss",)
        for name in ("model",) if several else ("model", *learns, "optimizer"):
            if not callable(getattr(self, name)):
                given = getattr(self, name)
                what = "is missing" if given is None else f"is {type(given).__name__}"
                raise TaskError(f"Task: {name} {what}; give a function. See docs/task.md.")
        for name in ("predict", "collate", "after_step", *(() if several else ("schedule",))):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                raise TaskError(f"Task: {name} is not a function. See docs/task.md.")
        see_that_phases_fit(self)
        if self.data is None:
            raise TaskError(
                "Task: data is missing; give a dict of tensors, a Dataset or a prepared folder."
            )
        if self.sampler is not None and self.weights is not None:
            raise TaskError("Task: sampler and weights are both given; leave one of them out.")
        if not self.replacement and self.weights is None:
            raise TaskError("Task: replacement=False is for weights=, which are not given.")
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


def objective_of(task: Task) -> "Callable[[Module, Any], Any] | None":
    """What is made small: the task's `loss`, or a `BatchLoss`; of several, none is the whole."""
    if task.embed is not None and task.batch_loss is not None:
        return BatchLoss(task.embed, task.batch_loss)
    return task.loss if callable(task.loss) else None


def see_that_phases_fit(task: Task) -> None:
    """Several optimizers: each has a loss, and in every round at least one is due."""
    if task.schedule_every not in ("step", "epoch"):
        raise TaskError(
            f"Task: schedule_every is {task.schedule_every!r}; it can be 'step' or 'epoch'."
        )
    if not isinstance(task.optimizer, Mapping):
        for name in ("every", "offset"):
            if getattr(task, name):
                raise TaskError(f"Task: {name} is for several optimizers: optimizer={{...}}.")
        return
    names = list(task.optimizer)
    if not names or not all(name and isinstance(name, str) for name in names):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TaskError('Task: optimizer={...} names each optimizer: {"d": ..., "g": ...}.')
    if not isinstance(task.loss, Mapping) or set(task.loss) != set(names):
        raise TaskError(
            f"Task: there are optimizers {', '.join(names)}; each needs a loss of its own: "
            f"loss={{{', '.join(f'{name!r}: ...' for name in names)}}}."
        )
    if task.schedule is not None and not isinstance(task.schedule, Mapping):
        raise TaskError(
            "Task: with several optimizers, schedule is a dict: "
            f"schedule={{{names[0]!r}: lambda optimizer: ...}}."
        )
    for field_name in ("optimizer", "loss", "schedule", "every", "offset"):
        given: Mapping[str, Any] = getattr(task, field_name) or {}
        for name, value in given.items():
            if name not in names:
                raise TaskError(
                    f"Task: {field_name} speaks of '{name}'; the optimizers are {', '.join(names)}."
                )
            if field_name in ("optimizer", "loss", "schedule") and not callable(value):
                raise TaskError(f"Task: {field_name}[{name!r}] is not a function.")
    if task.held_out is not None and not task.scores:
        raise TaskError(
            "Task: of several losses none is that of the whole, so held_out needs scores=... to be "
            "scored by. Give some, or leave held_out out."
        )
    _see_that_rounds_are_taken(names, task.every, task.offset)


def _see_that_rounds_are_taken(
    names: list[str], every: Mapping[str, int], offset: Mapping[str, int]
) -> None:
    for name, rounds in every.items():
        if not isinstance(rounds, int) or rounds < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TaskError(
                f"Task: every[{name!r}] is {rounds!r}; it is a number of rounds, 1 or more."
            )
    for name, first in offset.items():
        rounds = every.get(name, 1)
        if not isinstance(first, int) or not 0 <= first < rounds:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TaskError(
                f"Task: offset[{name!r}] is {first!r}; it must be below every[{name!r}], {rounds}."
            )
    if (period := math.lcm(*(every.get(name, 1) for name in names))) > LONGEST_PERIOD:
        raise TaskError(
            f"Task: with every={dict(every)} it takes {period:,} rounds until the optimizers are "
            f"due in the same way again; {LONGEST_PERIOD:,} at the most."
        )
    for round in range(period):
        if not any(round % every.get(name, 1) == offset.get(name, 0) for name in names):
            raise TaskError(
                f"Task: in round {round} (and every {period} after it) no optimizer is due, so its "
                "batch would train nothing. Leave `every` out for one of them."
            )
