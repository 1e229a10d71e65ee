# SPDX-License-Identifier: Apache-2.0
"""A task's optimizer (or optimizers) and schedules, built for a model."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import Module
from torch.optim import Optimizer

from manyhands.accounting.phases import phases_of
from manyhands.training.state.phased_optimizer import PhasedOptimizer
from manyhands.training.state.rows.embedding import Embedding
from manyhands.training.state.schedule_effects import refuse_functions_that_remember
from manyhands.training.state.schedules import Schedules, TimedSchedule
from manyhands.values.errors import TaskError
from manyhands.values.task import Task


def build_optimizer(task: Task, model: Module) -> Optimizer:
    assert task.optimizer is not None
    if not isinstance(task.optimizer, Mapping):
        return _built("optimizer", task.optimizer, model)
    parts = {
        name: _built(f"optimizer[{name!r}]", make, model) for name, make in task.optimizer.items()
    }
    phases = phases_of(task)
    assert phases is not None
    return PhasedOptimizer(parts, phases)


def build_schedules(task: Task, optimizer: Optimizer, model: Module, *, seed: int) -> Schedules:
    made: list[TimedSchedule] = []
    for phase, make in _named(task.schedule).items():
        part = optimizer.parts[phase] if isinstance(optimizer, PhasedOptimizer) else optimizer
        scheduler = make(part)
        refuse_functions_that_remember(scheduler, seed)
        made.append(TimedSchedule(scheduler, part, phase, task.schedule_every))
    return Schedules(optimizer, made, model, seed=seed)


def _named(schedule: Any) -> Mapping[str, Callable[[Optimizer], Any]]:
    if schedule is None:
        return {}
    return schedule if isinstance(schedule, Mapping) else {"": schedule}


def _built(what: str, make: Callable[[Module], Any], model: Module) -> Optimizer:
    tables = any(isinstance(module, Embedding) for module in model.modules())
    if tables and next(model.parameters(), None) is None:
        raise TaskError(
            f"Task: the model has tables (mh.Embedding) and no parameter beside them, which "
            f"{what} wants, as torch's do. Give it one: a bias, say."
        )
    made = make(model)
    if isinstance(made, torch.optim.Optimizer):
        return made
    several = isinstance(made, list | tuple | Mapping)
    cure = (
        "Several optimizers are given by name, each with its own loss: "
        'optimizer={"d": lambda model: ..., "g": ...}, loss={"d": ..., "g": ...}.'
        if several
        else "Give one optimizer, with a parameter group for each way of training."
    )
    raise TaskError(
        f"Task: {what} built {type(made).__name__}, not a torch.optim.Optimizer. {cure}"
    )
