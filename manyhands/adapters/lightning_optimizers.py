# SPDX-License-Identifier: Apache-2.0
"""What configure_optimizers returns, in every form that Lightning knows → one optimizer and its
schedule."""

from dataclasses import dataclass
from typing import Any, Literal

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from manyhands.values.errors import TaskError


@dataclass(frozen=True)
class Configured:
    optimizer: Optimizer
    scheduler: Any = None
    every: Literal["step", "epoch"] = "epoch"
    monitor: str | None = None
    """Of ReduceLROnPlateau: the score that it hears."""


def configured(module: Any) -> Configured:
    given, who = module.configure_optimizers(), f"{type(module).__name__}.configure_optimizers"
    optimizers, schedules, monitor = _taken_apart(given)
    if len(optimizers) > 1:
        raise TaskError(
            f"{who} gives {len(optimizers)} optimizers. Write them as mh.Task(optimizer={{"
            "'d': ..., 'g': ...}, loss={'d': ..., 'g': ...}): each with its loss, in their order."
        )
    if not optimizers or not isinstance(optimizers[0], Optimizer):
        found = type(given).__name__ if not optimizers else type(optimizers[0]).__name__
        raise TaskError(f"{who} gives {found}, not a torch.optim.Optimizer.")
    if not schedules:
        return Configured(optimizers[0])
    if len(schedules) > 1:
        raise TaskError(
            f"{who} gives {len(schedules)} schedulers for one optimizer; put them together with "
            "torch.optim.lr_scheduler.ChainedScheduler or SequentialLR."
        )
    return _with_schedule(optimizers[0], schedules[0], monitor, who)


def _taken_apart(given: Any) -> tuple[list[Any], list[Any], str | None]:
    """Optimizers, schedulers (or dicts of them), and what is monitored."""
    if isinstance(given, dict):
        schedule = given.get("lr_scheduler")
        return (
            [given.get("optimizer")],
            [] if schedule is None else [schedule],
            given.get("monitor"),
        )
    if not isinstance(given, list | tuple):
        return [given], [], None
    parts: list[Any] = list(given)
    if len(parts) == 2 and isinstance(parts[0], list):
        return parts[0], parts[1] if isinstance(parts[1], list) else [parts[1]], None
    if len(parts) == 1 and isinstance(parts[0], dict):
        return _taken_apart(parts[0])
    return parts, [], None


def _with_schedule(optimizer: Optimizer, given: Any, monitor: str | None, who: str) -> Configured:
    settings: dict[str, Any] = given if isinstance(given, dict) else {"scheduler": given}
    known = {"scheduler", "interval", "frequency", "monitor", "strict", "name", "reduce_on_plateau"}
    if strange := settings.keys() - known:
        raise TaskError(f"{who}: lr_scheduler has no '{min(strange)}'.")
    if settings.get("frequency", 1) != 1:
        raise TaskError(
            f"{who}: frequency = {settings['frequency']} cannot be honoured: a scheduler is "
            "stepped after every step or after every epoch. Let the scheduler itself wait (StepLR)."
        )
    scheduler, every = settings.get("scheduler"), settings.get("interval", "epoch")
    if every not in ("step", "epoch"):
        raise TaskError(f"{who}: interval is {every!r}; it can be 'step' or 'epoch'.")
    if not hasattr(scheduler, "step"):
        raise TaskError(f"{who}: {type(scheduler).__name__} is no learning-rate scheduler.")
    if isinstance(scheduler, ReduceLROnPlateau):
        monitor = settings.get("monitor") or monitor
        if monitor is None:
            raise TaskError(f"{who}: ReduceLROnPlateau needs 'monitor': the score that it hears.")
        return Configured(optimizer, scheduler, "epoch", monitor)
    return Configured(optimizer, scheduler, every)
