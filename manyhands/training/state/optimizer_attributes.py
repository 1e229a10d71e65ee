# SPDX-License-Identifier: Apache-2.0
"""What an optimizer keeps outside its state is neither saved nor handed over, so it must keep
nothing there: a worker that takes its place would begin with it anew, and train otherwise."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from manyhands.values.errors import OptimizerRefused

REMEDY = "Keep it in self.state[p] (tensors and numbers), or in self.param_groups."

# What torch itself puts there. (To make one and look would import the compiler: 1.5 s.)
_OWN = {
    *("defaults", "state", "param_groups"),
    *("_opt_called", "_zero_grad_profile_name", "_warned_capturable_if_run_uncaptured"),
}


def refuse_hidden_optimizers(optimizer: Optimizer) -> None:
    """One inside another, with a state of its own."""
    for name, value in vars(optimizer).items():
        for inner in value if isinstance(value, list | tuple) else (value,):  # pyright: ignore[reportUnknownVariableType]
            if isinstance(inner, Optimizer) and inner.state is not optimizer.state:
                raise OptimizerRefused(
                    f"{type(optimizer).__name__} holds another optimizer ({type(inner).__name__}) "
                    f"in '{name}', whose state is neither saved nor handed over to a worker that "
                    "takes its place. Let them share one: self.state = inner.state."
                )


class OptimizerAttributes:
    """Numbers and tensors in plain attributes, looked at around a step."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.before = dict(_plain(optimizer))

    def refuse_changes(self) -> None:
        for name, value in _plain(self.optimizer):
            if self.before.get(name) != value:
                raise OptimizerRefused(
                    f"{type(self.optimizer).__name__} changes its attribute '{name}' in a step, "
                    f"which is neither saved nor handed over to a worker that takes its place. "
                    f"{REMEDY}"
                )


def _plain(optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    for name, value in vars(optimizer).items():
        if name in _OWN or name.startswith("_optimizer_"):
            continue
        if isinstance(value, bool | int | float | str):
            yield name, value
        elif isinstance(value, Tensor):
            yield name, (id(value), value._version)
        elif isinstance(value, list | dict | set):
            yield name, len(value)  # pyright: ignore[reportUnknownArgumentType]
