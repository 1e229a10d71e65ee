# SPDX-License-Identifier: Apache-2.0
"""A feature that a worker leaves out for ten steps, does for ten, and so on."""

from typing import Any

TURN = 10


def left_out(step: int) -> bool:
    return step // TURN % 2 == 0


def leave_out_in_turns() -> None:
    """In a worker, before it builds anything: moving averages and after_step."""
    from manyhands.training.state import weight_average
    from manyhands.training.sync.allreduce.allreduce import AllReduce

    plan, step = weight_average.WeightAverage.plan, AllReduce.step

    def plan_in_turns(self: Any, at: int, *, skipped: bool) -> None:
        if not left_out(at):
            plan(self, at, skipped=skipped)

    def step_in_turns(self: Any) -> None:
        after = self.after
        if left_out(self.replica.step):
            self.after = None
        step(self)
        self.after = after

    weight_average.WeightAverage.plan = plan_in_turns
    AllReduce.step = step_in_turns
