# SPDX-License-Identifier: Apache-2.0
"""A work of the benchmarks as a task: `BENCHMARK_WORK=mlp manyhands train` this file."""

import os

import torch
from clock import Clock
from in_turns import leave_out_in_turns
from works import LEARNING_RATE, WORKS

import manyhands as mh

work = WORKS[os.environ["BENCHMARK_WORK"]]
AFTER = os.environ.get("BENCHMARK_AFTER")
"""Something that comes after a step, in turns with nothing: "ema" or "clip"."""


def clip(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter.clamp_(-0.5, 0.5)


def model() -> torch.nn.Module:
    if AFTER is not None:
        leave_out_in_turns()
    return work.model()


task = mh.Task(
    model=model,
    loss=work.loss,
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True),
    schedule=lambda optimizer: Clock(),
    after_step=clip if AFTER == "clip" else None,
    data=work.data(),
)
