# SPDX-License-Identifier: Apache-2.0
"""Several optimizers as one: its groups are those of all of them, in order, and in each step one
of them acts. A parameter is in one of them at the most; in the steps of the others it has no
gradient, and None is not zero: neither the weight nor what is kept for it changes."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from manyhands.accounting.phases import Phases
from manyhands.values.errors import TaskError


class PhasedOptimizer(Optimizer):
    """The holder of groups and state; `acting(step)` is whoever takes a step."""

    def __init__(self, parts: Mapping[str, Optimizer], phases: Phases) -> None:
        # Not super's: it would put its own defaults into groups that are others'.
        self.parts, self.phases = dict(parts), phases
        self.defaults: dict[str, Any] = {}
        self.param_groups = [group for part in parts.values() for group in part.param_groups]
        self.state: defaultdict[Tensor, Any] = defaultdict(dict)
        for part in parts.values():  # one state, in which each finds its own parameters
            self.state.update(part.state)
            part.state = self.state

    def step(self, closure: Any = None) -> Any:  # pyright: ignore
        raise AssertionError("one of its parts takes the step")

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts.values():
            part.zero_grad(set_to_none)

    def groups_by_part(self, groups: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
        """Groups like its own, in the same order, for each part."""
        rest, found = list(groups), dict[str, list[dict[str, Any]]]()
        for name, part in self.parts.items():
            count = len(part.param_groups)
            found[name], rest = rest[:count], rest[count:]
        return found

    def refuse_shared_parameters(self, names: Mapping[int, str]) -> None:
        """`names` of parameters by their ids."""
        owner: dict[int, str] = {}
        for phase, part in self.parts.items():
            for parameter in (p for group in part.param_groups for p in group["params"]):
                if (other := owner.setdefault(id(parameter), phase)) != phase:
                    which = names.get(id(parameter), f"of shape {list(parameter.shape)}")
                    raise TaskError(
                        f"Task: parameter '{which}' is in two optimizers, '{other}' and '{phase}'. "
                        "Which of them moves it? Give it to one of them."
                    )


def parts_of(optimizer: Optimizer) -> list[Optimizer]:
    return list(optimizer.parts.values()) if isinstance(optimizer, PhasedOptimizer) else [optimizer]


def acting(optimizer: Optimizer, step: int) -> Optimizer:
    """Whoever takes step number `step`."""
    if isinstance(optimizer, PhasedOptimizer):
        return optimizer.parts[optimizer.phases.phase(step)]
    return optimizer


def kind_name(optimizer: Optimizer) -> str:
    """What a checkpoint calls it."""
    if isinstance(optimizer, PhasedOptimizer):
        return ", ".join(f"{name}: {type(part).__name__}" for name, part in optimizer.parts.items())
    return type(optimizer).__name__
