# SPDX-License-Identifier: Apache-2.0
"""The schedules that most people write by hand, as functions of the step alone."""

import math
from collections.abc import Callable
from typing import Any, Literal

from manyhands.accounting.deal_micro_batches import steps_per_epoch as batches_of
from manyhands.values.errors import TaskError

FallShape = Literal["cosine", "linear", "constant"]


def warmup(
    steps: int, total: int | None = None, *, shape: FallShape = "cosine", least: float = 0.0
) -> Callable[[Any], Any]:
    """A schedule for `Task(schedule=...)`: the rate rises from 0 over `steps` steps, then falls to
    `least` of what it was at step `total`, along a cosine or a line; or stays ("constant")."""
    if shape not in ("cosine", "linear", "constant"):
        raise TaskError(f"warmup: shape is {shape!r}; it can be cosine, linear or constant.")
    if shape != "constant" and (total is None or total <= steps):
        raise TaskError(
            f"warmup: shape={shape!r} falls until step `total`, which must be more than the "
            f"{steps} steps of warming up: warmup(100, total=1000). mh.steps_per_epoch(...) helps."
        )

    def factor(step: int) -> float:
        if step < steps:
            return (step + 1) / (steps + 1)
        if shape == "constant" or total is None:
            return 1.0
        done = min(1.0, (step - steps) / (total - steps))
        fall = 0.5 * (1 + math.cos(math.pi * done)) if shape == "cosine" else 1 - done
        return least + (1 - least) * fall

    def schedule(optimizer: Any) -> Any:
        from torch.optim.lr_scheduler import LambdaLR

        return LambdaLR(optimizer, factor)

    return schedule


def steps_per_epoch(data: Any, batch: int) -> int:
    """How many batches an epoch has: of so many records, or of anything with a length; of a dict of
    columns, the length of a column. (A last single record joins the batch before it.)"""
    if isinstance(data, dict):
        data = next(iter(data.values()))  # pyright: ignore[reportUnknownVariableType]
    records = data if isinstance(data, int) else len(data)  # pyright: ignore[reportUnknownArgumentType]
    if records < 1 or batch < 1:
        raise TaskError(f"steps_per_epoch: {records} records in batches of {batch}.")
    return batches_of(records, batch)
