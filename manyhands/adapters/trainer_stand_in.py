# SPDX-License-Identifier: Apache-2.0
"""What a LightningModule finds in place of its Trainer: what is known is told, and whatever else it
asks for is refused by name. A micro-batch does not know which step, epoch or worker it belongs to:
its gradient must not depend on them in ways that nobody can compute again."""

from collections.abc import Callable
from typing import Any, NoReturn

from manyhands.values.errors import TaskError

OWN_COUNT = (
    "a micro-batch is not told when it is computed. Count in a buffer of the module: "
    "self.register_buffer('steps', torch.zeros((), dtype=torch.long)), and self.steps += 1 in "
    "training_step: all micro-batches of a step begin with the same value."
)

REASONS = {
    "current_epoch": OWN_COUNT,
    "global_step": OWN_COUNT,
    "strategy": "there is none; optimizers and the sum of gradients are not the module's.",
    "optimizers": "steps are taken by all workers together, each on a part of the weights.",
    "lr_scheduler_configs": "schedules are stepped elsewhere; the log shows lr.",
    "callback_metrics": "scores are in the run's events and in mh.report(RUN).",
    "logged_metrics": "numbers are in the run's events and in mh.report(RUN).",
}


class TrainerStandIn:
    """Read-only. `facts` are the attributes that there are."""

    def __init__(self, facts: dict[str, Any]) -> None:
        self.__dict__["_facts"] = facts

    def __getattr__(self, name: str) -> Any:
        facts: dict[str, Any] = self.__dict__.get("_facts", {})
        if name in facts:
            return facts[name]
        if name.startswith("__"):
            raise AttributeError(name)
        why = REASONS.get(name, f"known are: {', '.join(facts)}.")
        raise TaskError(f"the module reads self.trainer.{name}, and there is no Trainer: {why}")

    def __setattr__(self, name: str, value: Any) -> None:
        raise TaskError(f"the module sets self.trainer.{name}, and there is no Trainer.")


def stand_in_facts(config: dict[str, Any], steps: int, per_epoch: int) -> dict[str, Any]:
    """What a module may ask its Trainer, from the settings that came with it."""
    train: dict[str, Any] = config["train"]
    return {
        "max_epochs": train.get("epochs"),
        "max_steps": train.get("steps", -1),
        "estimated_stepping_batches": steps,
        "num_training_batches": per_epoch,
        "accumulate_grad_batches": 1,
        "gradient_clip_val": train.get("clip_norm"),
        "gradient_clip_algorithm": "norm",
        "world_size": 1,
        "num_devices": 1,
        "num_nodes": 1,
        "global_rank": 0,
        "local_rank": 0,
        "is_global_zero": True,
        "logger": None,
        "loggers": [],
        "progress_bar_callback": None,
        "sanity_checking": False,
        "fast_dev_run": False,
    }


def _refuse(index: "NoIndex", *_: Any) -> NoReturn:
    raise TaskError(f"{index.who} uses batch_idx: {OWN_COUNT}")


class NoIndex:
    """Given as batch_idx: it can be passed on, and not be used."""

    def __init__(self, who: str) -> None:
        self.who = who

    def __repr__(self) -> str:
        _refuse(self)

    __hash__: Callable[..., Any] = _refuse  # pyright: ignore[reportIncompatibleMethodOverride]


for _verb in [
    "add",
    "radd",
    "sub",
    "rsub",
    "mul",
    "rmul",
    "mod",
    "rmod",
    "floordiv",
    "rfloordiv",
    "truediv",
    "rtruediv",
    "divmod",
    "pow",
    "and",
    "or",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "bool",
    "int",
    "float",
    "index",
    "neg",
    "abs",
    "str",
    "format",
]:
    setattr(NoIndex, f"__{_verb}__", _refuse)
