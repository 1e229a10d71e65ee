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


def _tensors(model: Module) -> list[tuple[str, Tensor, bool]]:
    return [*parameters_of(model), *buffers_of(model)]
