# SPDX-License-Identifier: Apache-2.0
"""A schedule is stepped on every worker, so it may change the optimizer's groups and nothing else.

Weights live once in a host's memory: what each of its workers did to them would be done several
times. What it did to buffers would be lost, as each worker's are its own between two steps. Both
belong in a step hook of the optimizer, which runs once (sharded_optimizer.py).
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from manyhands.training.compute.seeds import seed_everything
from manyhands.training.state.layout import buffers_of, parameters_of
from manyhands.values.errors import TaskError


@contextmanager
def groups_alone(schedule: Any, model: Module) -> Generator[None]:
    """Refuses a schedule that changes a weight or a buffer of the model."""
    before = [(name, t, t._version) for name, t, _ in _tensors(model)]
    own = not type(schedule).__module__.startswith("torch.")  # may write past the version counter
    copies = {name: b.clone() for name, b, _ in buffers_of(model)} if own else {}
    yield
    now = {name: t for name, t, _ in _tensors(model)}
    for name, tensor, version in before:
        same = now.get(name) is tensor and tensor._version == version
        if not same or (name in copies and not torch.equal(copies[name], tensor)):
            raise TaskError(
                f"the schedule ({type(schedule).__name__}) changed '{name}' of the model. A "
                "schedule is stepped on every worker and may only change the optimizer's groups; "
                "do this in a step hook of the optimizer: optimizer.register_step_post_hook(...)."
            )


def refuse_functions_that_remember(schedule: Any, seed: int) -> None:
    """A function of the step gives the same number whenever it is asked: a worker that comes later,
    or a resumed run, has not asked it before."""
    for part in (schedule, *getattr(schedule, "_schedulers", ())):
        for function in getattr(part, "lr_lambdas", ()):
            found: list[Any] = []
            for step in (1, 2, 1, 2):
                seed_everything(seed, step, "schedule")
                found.append(function(step))
            if found[:2] != found[2:]:
                raise TaskError(
                    f"a function of {type(part).__name__} gives another number each time it is "
                    f"asked for the same step ({found[0]} and {found[2]} for step 1): it keeps "
                    "something in a variable of Python, which a worker that comes later, or a "
                    "resumed run, does not have. Compute it from the step it is given."
                )


def _tensors(model: Module) -> list[tuple[str, Tensor, bool]]:
    return [*parameters_of(model), *buffers_of(model)]
