# SPDX-License-Identifier: Apache-2.0
"""The work as a task whose loss notes which step it is called for.

A loss is not told the step, so the records tell it: there are enough of them for one long epoch,
and each knows the step in which that epoch visits it.
"""

import diary
import numpy as np
import torch
from torch import Tensor, nn
from works import LEARNING_RATE, WORKS

import manyhands as mh
from manyhands.data.ordering.epoch_order import order

STEPS, SEED = 10_000, 0

work = WORKS[diary.WORK]
rows = work.data()
positions = np.arange(STEPS * work.batch)
step_of = np.empty(len(positions), dtype=np.int32)
step_of[order(SEED, 0, len(positions))[positions]] = positions // work.batch


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    done = int(batch["step"][0])
    if not (batch["step"] == done).all():
        raise RuntimeError("the records of a micro-batch are not of one step: the order is another")
    diary.note(done)
    return work.loss(model, {name: column[batch["row"]] for name, column in rows.items()})


task = mh.Task(
    model=work.model,
    loss=loss,
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True),
    data={"step": step_of, "row": (positions % len(rows["x"])).astype(np.int32)},
)

config = {"train": {"batch": work.batch, "steps": STEPS, "seed": SEED}}
