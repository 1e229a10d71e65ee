# SPDX-License-Identifier: Apache-2.0
"""Hyper-parameters of an optimizer, and the state of a schedule that acts on them, as plain data
and back."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from manyhands.values.errors import OptimizerRefused


def groups_to_json(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The hyper-parameters of each group, as far as they are numbers, strings and lists of them."""
    return [
        {key: plain for key, value in group.items() if (plain := _plain(value)) is not _NOT_PLAIN}
        for group in ({k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups)
    ]


def groups_from_json(optimizer: Optimizer, saved: Sequence[dict[str, Any]]) -> None:
    if len(saved) != len(optimizer.param_groups):
        raise OptimizerRefused(
            f"the checkpoint's optimizer has {len(saved)} parameter groups, this task's has "
            f"{len(optimizer.param_groups)}."
        )
    for group, values in zip(optimizer.param_groups, saved, strict=True):
        for key, value in values.items():
            _set_in_group(group, key, value)


def change_groups(optimizer: Optimizer, schedule: Any | None, settings: Mapping[str, Any]) -> None:
    """Set hyper-parameters in every group. Doing it twice is the same as doing it once.

    `lr` is the base rate: a schedule goes on from it, with the factor that it has reached.
    """
    for key, value in settings.items():
        for k, group in enumerate(optimizer.param_groups):
            if key != "lr" or schedule is None or "initial_lr" not in group:
                _set_in_group(group, key, value)
                continue
            factor = float(group["lr"]) / base if (base := float(group["initial_lr"])) else 1.0
            _set_in_group(group, "lr", value * factor if base != value else group["lr"])
            group["initial_lr"] = value
            for inner in (schedule, *getattr(schedule, "_schedulers", ())):
                if hasattr(inner, "base_lrs"):
                    inner.base_lrs[k] = value


def kinds_of(schedule: Any | None) -> list[str]:
    """The classes of a schedule and of those inside it."""
    if schedule is None:
        return []
    inner: Sequence[Any] = getattr(schedule, "_schedulers", ())
    return [type(schedule).__name__, *(kind for part in inner for kind in kinds_of(part))]


def _set_in_group(group: dict[str, Any], key: str, value: Any) -> None:
    old: Any = group.get(key)
    if isinstance(old, Tensor):
        old.fill_(float(value))
    else:
        group[key] = tuple(value) if isinstance(old, tuple) else value


_NOT_PLAIN = object()


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dim() == 0:
        return value.item()
    if isinstance(value, list | tuple):
        items = [_plain(v) for v in value]
        return _NOT_PLAIN if any(i is _NOT_PLAIN for i in items) else items
    return value if value is None or isinstance(value, bool | int | float | str) else _NOT_PLAIN


def schedule_to_json(schedule: Any | None) -> str | None:
    """A scheduler's state, or None when it holds more than numbers (it is then stepped again)."""
    if schedule is None:
        return None
    try:
        state = schedule.state_dict()
        text = json.dumps(state)
    except (TypeError, ValueError, AttributeError):
        return None
    # MultiStepLR's milestones are a dict with whole numbers as keys, which JSON makes strings.
    return text if _alike(json.loads(text), state) else None


def _alike(read: Any, state: Any) -> bool:
    """Whether what JSON gives back is what was put in (tuples may have become lists)."""
    if isinstance(state, dict):
        return (
            isinstance(read, dict)
            and read.keys() == state.keys()
            and all(_alike(read[k], v) for k, v in state.items())
        )
    if isinstance(state, list | tuple):
        return len(read) == len(state) and all(map(_alike, read, state))
    return type(read) is type(state) and read == state
