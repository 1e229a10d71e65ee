# SPDX-License-Identifier: Apache-2.0
"""What people write into a Task by habit, answered where it is written and not in a worker.

Nothing is called here: it is only seen whether it could be, with what it will be given.
"""

import functools
import inspect
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import fields
from functools import partial
from typing import Any, TypeVar

from manyhands.values.config import EFFECTS
from manyhands.values.errors import TaskError
from manyhands.values.other_words import meant, of_the_optimizer, setting_called

T = TypeVar("T")

CALLED = {
    "model": (),
    "loss": ("model", "batch"),
    "embed": ("model", "batch"),
    "optimizer": ("model",),
    "schedule": ("optimizer",),
    "predict": ("model", "batch"),
    "collate": ("records",),
}
"""Field → what its function is given."""

OTHER_NAMES = {
    "net": "model",
    "network": "model",
    "module": "model",
    "criterion": "loss",
    "loss_fn": "loss",
    "objective": "loss",
    "optim": "optimizer",
    "lr_scheduler": "schedule",
    "dataset": "data",
    "train": "data",
    "train_data": "data",
    "dataloader": "data",
    "train_loader": "data",
    "train_dataset": "data",
    "train_dataloader": "data",
    "train_dataloaders": "data",
    "val_dataset": "held_out",
    "eval_dataset": "held_out",
    "valid_dataset": "held_out",
    "test_dataset": "held_out",
    "val_loader": "held_out",
    "val_dataloader": "held_out",
    "val_dataloaders": "held_out",
    "eval_dataloader": "held_out",
    "valid": "held_out",
    "validation": "held_out",
    "val": "held_out",
    "val_data": "held_out",
    "eval": "held_out",
    "test": "held_out",
    "test_data": "held_out",
    "metrics": "scores",
    "compute_metrics": "scores",
    "collate_fn": "collate",
}
"""What other libraries call it → what it is called here."""

OTHER_WAYS = {
    "n_critic": 'how often each optimizer steps is every={"g": 5}, with loss and optimizer as '
    "dicts that have the same names",
    "callbacks": "what is watched while it trains is given to mh.train(task, on_step=..., "
    "on_evaluate=...), stopping early is a setting (--set evaluate.stop_early=3), and what changes "
    "weights after a step is after_step=...",
}
"""What is done otherwise here, and how."""


def answering(task: type[T]) -> type[T]:
    """A dataclass that is made by names alone, each of which is known; it looks as before."""
    made: Any = task.__init__

    @functools.wraps(made)
    def init(self: Any, *unnamed: Any, **given: Any) -> None:
        if unnamed:
            raise TaskError("Task: its fields are given by name: mh.Task(model=..., loss=..., ...)")
        known: Any = task
        see_that_names_are_right(given, [each.name for each in fields(known)])
        if "model" not in given:
            raise TaskError("Task: model is missing; give a function. See docs/task.md.")
        made(self, **given)

    task.__init__ = init
    return task


def see_that_names_are_right(given: Iterable[str], known: list[str]) -> None:
    for name in given:
        if name in known:
            continue
        if (own := of_the_optimizer(name)) is not None:
            raise TaskError(
                f"Task has no '{name}': that is the optimizer's, as in "
                f"optimizer=lambda model: torch.optim.AdamW(model.parameters(), {own}=...)."
            )
        if (setting := setting_called(name, EFFECTS)) is not None:
            raise TaskError(
                f"Task has no '{name}': how it is trained is not in it. That is a setting: "
                f'--set {setting}=..., or settings=["{setting}=..."] in Python.'
            )
        if name in OTHER_WAYS:
            raise TaskError(f"Task has no '{name}': {OTHER_WAYS[name]}. See docs/task.md.")
        other = OTHER_NAMES.get(name.lower())
        raise TaskError(f"Task has no '{name}'{meant(name, known, other)}")


def see_that_it_can_be_called(name: str, given: Any) -> None:
    """`given` is a function that is called as its field says; or a dict of such."""
    if isinstance(given, Mapping):
        for one in given.values():
            see_that_it_can_be_called(name, one)
        return
    if not callable(given):
        if hasattr(given, "param_groups") or hasattr(given, "last_epoch"):
            what = type(given).__name__
            raise TaskError(
                f"Task: {name} is a {what} that has been made already; workers make their own. "
                f"Give a function: {name}=lambda {', '.join(CALLED[name])}: {what}(...)."
            )
        return
    function: Any = given.func if isinstance(given, partial) else given
    of = getattr(function, "__module__", None) or type(function).__module__
    called = str(getattr(function, "__name__", type(function).__name__))
    if name == "loss" and of == "torch.nn.modules.loss":
        called += "()"
    if name == "loss" and of in ("torch.nn.modules.loss", "torch.nn.functional"):
        raise TaskError(
            f"Task: loss is {called}, which is given predictions; it is called with the model and "
            f'a batch: loss=lambda model, batch: {called}(model(batch["x"]), batch["y"]).'
        )
    if name == "optimizer" and _takes_parameters(function):
        raise TaskError(
            f"Task: optimizer is the class {called}, which is given parameters; it is called with "
            f"the model: optimizer=lambda model: {called}(model.parameters(), lr=...)."
        )
    if name == "model" and hasattr(given, "state_dict") and not isinstance(given, type):
        return  # a module itself
    _see_that_it_takes(name, given, CALLED[name])


def _see_that_it_takes(name: str, function: Any, arguments: tuple[str, ...]) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # one of C's
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        called = getattr(function, "__name__", type(function).__name__)
        how = f"with ({', '.join(arguments)})" if arguments else "without arguments"
        raise TaskError(
            f"Task: {name} is called {how}, which {called}({', '.join(signature.parameters)}) does "
            f"not take: {error}."
            + (f" Write model=lambda: {called}(...)." if name == "model" else "")
        ) from None


def see_that_data_is_named(name: str, given: Any) -> None:
    """`data` or `held_out`: columns have names."""
    sizes = [_rows(one) for one in given] if type(given) is tuple and 1 < len(given) < 5 else []  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    if sizes and None not in sizes and len(set(sizes)) == 1:
        raise TaskError(
            f"Task: {name} is a tuple of {len(sizes)} arrays; give its columns names: "
            f'{name}={{"x": ..., "y": ...}}, and batches are dicts with these names.'
        )
    if name == "held_out" and isinstance(given, str) and given.rstrip("%").strip()[:1].isdigit():
        with suppress(ValueError):
            share = float(given.rstrip("%")) / (100 if given.endswith("%") else 1)
            raise TaskError(f"Task: held_out is text; a fraction is a number: held_out={share}.")


def see_that_scores_can_be_called(scores: Any) -> None:
    if not isinstance(scores, Mapping):
        what = type(scores).__name__
        raise TaskError(f'Task: scores is {what}; give each a name: scores={{"accuracy": ...}}.')
    named: Mapping[str, Any] = scores
    for name, score in named.items():
        if callable(score) and not hasattr(score, "update"):
            _see_that_it_takes(f"score '{name}'", score, ("predictions", "targets"))


def _rows(array: Any) -> int | None:
    shape = getattr(array, "shape", None)
    return int(shape[0]) if shape else None


def _takes_parameters(function: Any) -> bool:
    """A class of torch's optimizers, whose first argument is what it optimizes."""
    if not isinstance(function, type):
        return False
    if not any(k.__module__ == "torch.optim.optimizer" for k in function.__mro__):
        return False
    return next(iter(inspect.signature(function).parameters), "") == "params"
