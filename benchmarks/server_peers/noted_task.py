# SPDX-License-Identifier: Apache-2.0
"""The MLP as a task that writes down when each of its steps had been taken, in every process.

A line is `<nanoseconds of CLOCK_MONOTONIC> <optimizer steps that are done>`. Who joins later takes
the schedule's steps since some earlier one again: only numbers that nobody had before say anything.
"""

from typing import Any

import diary
import torch
from works import LEARNING_RATE, WORKS

import manyhands as mh

work = WORKS[diary.WORK]


class Noted:
    """A schedule that leaves the learning rate alone."""

    def __init__(self) -> None:
        self.done = 0

    def step(self) -> None:
        self.done += 1
        diary.note(self.done)

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done = state["done"]


task = mh.Task(
    model=work.model,
    loss=work.loss,
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True),
    schedule=lambda optimizer: Noted(),
    data=work.data(),
)

config = {"train": {"batch": work.batch, "micro_batch": work.batch // 2, "steps": 10_000_000}}
