# SPDX-License-Identifier: Apache-2.0
"""The user's learning-rate schedulers, and when each is stepped: after every step of its optimizer,
after every epoch, or (ReduceLROnPlateau) when a score of the held-out records is heard.

They are stepped on every worker, with the same numbers, and may change the optimizer's groups and
nothing else (schedule_effects.py). A score that was heard is in the run's journal, so that whoever
comes later, resumes or replays hears it after the same step; each counts once (`heard`).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from manyhands.training.compute.seeds import seed_everything
from manyhands.training.state.param_groups import (
    change_groups,
    groups_from_json,
    kinds_of,
    schedule_to_json,
)
from manyhands.training.state.phased_optimizer import PhasedOptimizer, acting
from manyhands.training.state.schedule_effects import groups_alone
from manyhands.values.config import HEARD_SCORE
from manyhands.values.errors import TaskError

Every = Literal["step", "epoch"]


@dataclass(slots=True)
class TimedSchedule:
    scheduler: Any
    optimizer: Optimizer
    phase: str
    """Whose; empty where there is one optimizer."""
    every: Every = "step"
    heard: int = -1
    """The last step (how many were done) whose score it was told."""

    @property
    def on_scores(self) -> bool:
        return isinstance(self.scheduler, ReduceLROnPlateau)


class Schedules:
    """Those of a replica; there may be none."""

    def __init__(
        self, optimizer: Optimizer, parts: Sequence[TimedSchedule], model: Module, *, seed: int
    ) -> None:
        self.optimizer, self.parts, self.model, self.seed = optimizer, parts, model, seed
        self.ends_epoch: Callable[[int], bool] = _not_known
        """Whether an epoch ends with a step."""
        self._groups = len(optimizer.param_groups)

    @property
    def on_scores(self) -> bool:
        return any(part.on_scores for part in self.parts)

    def kinds(self) -> list[str]:
        return [kind for part in self.parts for kind in kinds_of(part.scheduler)]

    def after(self, step: int) -> None:
        """Step number `step` (from 0) has been taken."""
        for part in self.parts:
            self._after(part, step)
        if len(self.optimizer.param_groups) != self._groups or self._grown():
            raise TaskError(
                "Task: the schedule added a parameter group to the optimizer. Which parameters "
                "are trained is settled when the run starts: give it all groups, and let the "
                "schedule raise their lr from 0."
            )

    def hear(self, done: int, score: float) -> None:
        """A score of the weights after `done` steps. Heard again, it changes nothing."""
        for part in self.parts:
            if part.on_scores and part.heard < done:
                part.heard = done
                self._step(part, done, score)

    def have_heard(self, done: int) -> bool:
        return all(part.heard >= done for part in self.parts if part.on_scores)

    def times_stepped(self, part: TimedSchedule, steps: int) -> int:
        """In a run of so many steps."""
        return sum(not part.on_scores and self._due(part, step) for step in range(steps))

    def change(self, settings: Mapping[str, Any]) -> None:
        """Hyper-parameters of every group."""
        optimizer = self.optimizer
        by_phase = optimizer.parts if isinstance(optimizer, PhasedOptimizer) else {"": optimizer}
        schedulers = {part.phase: part.scheduler for part in self.parts}
        for phase, part in by_phase.items():
            change_groups(part, schedulers.get(phase), settings)

    def to_json(self) -> str | None:
        """None, or null for one of several, when it holds more than numbers: it is then stepped
        again."""
        states = {part.phase: schedule_to_json(part.scheduler) for part in self.parts}
        if not states or self._is_plain():
            return states.get("")
        heard = {part.phase: part.heard for part in self.parts}
        return json.dumps({"states": states, "heard": heard})

    def restore(self, groups: Sequence[dict[str, Any]], saved: str | None, step: int) -> None:
        """Groups and schedulers as they were after `step` steps; they are fresh now."""
        plain = self._is_plain()
        read: Any = {} if saved is None or plain else json.loads(saved)
        states: dict[str, str | None] = {"": saved} if plain else read.get("states", {})
        for part in self.parts:
            for done in range(step) if states.get(part.phase) is None else ():
                self._after(part, done)
        groups_from_json(self.optimizer, groups)
        for part in self.parts:
            if (state := states.get(part.phase)) is not None:
                part.scheduler.load_state_dict(json.loads(state))
                part.heard = read.get("heard", {}).get(part.phase, -1)

    def _is_plain(self) -> bool:
        return len(self.parts) == 1 and not self.parts[0].phase and not self.on_scores

    def _after(self, part: TimedSchedule, step: int) -> None:
        if not part.on_scores and self._due(part, step):
            self._step(part, step)

    def _due(self, part: TimedSchedule, step: int) -> bool:
        if part.every == "epoch":
            return self.ends_epoch(step)
        return acting(self.optimizer, step) is part.optimizer

    def _step(self, part: TimedSchedule, step: int, *score: float) -> None:
        part.optimizer._opt_called = True  # type: ignore[attr-defined]  # it was, elsewhere
        with groups_alone(part.scheduler, self.model):
            seed_everything(self.seed, step, "schedule")
            part.scheduler.step(*score)

    def _grown(self) -> bool:
        if not isinstance(self.optimizer, PhasedOptimizer):
            return False
        return self._groups != sum(len(p.param_groups) for p in self.optimizer.parts.values())


def no_schedules(optimizer: Optimizer, model: Module) -> Schedules:
    return Schedules(optimizer, (), model, seed=0)


def split_heard(
    settings: Mapping[str, Any],
) -> tuple[dict[str, Any], float | None, dict[str, Any]]:
    """What was journalled at a step, in the order in which it happened: the optimizer's
    hyper-parameters (those of other things, with a dot, are not ours) that were set before a score
    was heard, the score, and those that were set after it. Without a score: all are before it."""
    parts: tuple[dict[str, Any], dict[str, Any]] = {}, {}
    score: float | None = None
    for key, value in settings.items():
        if key == HEARD_SCORE:
            score = float(value)
        elif "." not in key:
            parts[score is not None][key] = value
    return parts[0], score, parts[1]


def _not_known(step: int) -> bool:
    raise AssertionError("said when the data is opened")
