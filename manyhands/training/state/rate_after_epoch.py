# SPDX-License-Identifier: Apache-2.0
"""What the learning rate will be after the first epoch, told before the first step: a StepLR that
was meant to be stepped once an epoch, and is stepped after every step, ends near 0 by then."""

import json

from torch.optim.lr_scheduler import OneCycleLR

from manyhands.training.state.param_groups import groups_from_json, groups_to_json, schedule_to_json
from manyhands.training.state.schedules import Schedules, TimedSchedule
from manyhands.values.errors import TaskError

MOST_STEPS = 5000
"""How far it looks ahead."""

SMALL = 0.1
"""Of the first rate: whoever falls below it within an epoch was hardly meant to."""

FALLING = ("StepLR", "MultiStepLR", "ExponentialLR", "MultiplicativeLR")
"""Those whose examples count epochs, and which only ever fall."""


def rates_ahead(schedules: Schedules, steps_per_epoch: int) -> list[str]:
    """A line for each scheduler whose rate falls so far. It is stepped ahead here, and put back."""
    if steps_per_epoch > MOST_STEPS:
        return []
    return [
        line
        for part in schedules.parts
        if part.every == "step" and (line := _line(part, steps_per_epoch)) is not None
    ]


def refuse_short_schedules(schedules: Schedules, steps: int) -> None:
    """OneCycleLR ends with its total_steps, and fails at one more: that is said before the first.
    Other schedules go on as they are."""
    for part in schedules.parts:
        if not isinstance(part.scheduler, OneCycleLR):
            continue
        lasts = int(part.scheduler.total_steps)
        if steps <= lasts or (needed := schedules.times_stepped(part, steps)) <= lasts:
            continue
        whose = f" of '{part.phase}'" if part.phase else ""
        raise TaskError(
            f"Task: the schedule{whose}, {type(part.scheduler).__name__}, has total_steps = "
            f"{lasts}, and this run of {steps} steps would step it {needed} times (after every "
            f"{part.every}), where torch fails. Give it total_steps={needed}, or train for less."
        )


def _line(part: TimedSchedule, steps: int) -> str | None:
    scheduler, saved = part.scheduler, schedule_to_json(part.scheduler)
    if type(scheduler).__name__ not in FALLING or saved is None:
        return None
    optimizer, groups = part.optimizer, groups_to_json(part.optimizer)
    first = float(optimizer.param_groups[0]["lr"])
    called = getattr(optimizer, "_opt_called", None)
    optimizer._opt_called = True  # type: ignore[attr-defined]  # or torch warns
    for _ in range(steps):
        scheduler.step()
    then = float(optimizer.param_groups[0]["lr"])
    groups_from_json(optimizer, groups)
    scheduler.load_state_dict(json.loads(saved))
    if called is not None:
        optimizer._opt_called = called  # type: ignore[attr-defined]
    if first == 0 or then >= SMALL * first:
        return None
    whose = f" of '{part.phase}'" if part.phase else ""
    return (
        f"the learning rate{whose} is {first:g} now and {then:g} after the first epoch: "
        f"{type(scheduler).__name__} is stepped after each of its {steps} steps. If it counts "
        'epochs, write Task(schedule_every="epoch").'
    )
