# SPDX-License-Identifier: Apache-2.0
"""Records that come one after the other, from a function that yields them: sums of two numbers.

Nobody knows how many there are, so the run is as long as train.steps says. Records are numbered as
they come and dealt by number, so the weights are the same on any number of workers.

manyhands train examples/12_stream.py --to runs/stream --workers 2
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

import manyhands as mh


def sums() -> Iterator[dict[str, Tensor]]:
    """As if from a queue, a log or a simulator. What it draws is seeded for each record."""
    number = 0
    while True:
        number += 1
        pair = torch.randn(2)
        noise = 0.01 * math.sin(number)
        yield {"pair": pair, "sum": pair.sum() + noise}


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 1))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (model(batch["pair"]).squeeze(1) - batch["sum"]).square().mean()


g = torch.Generator().manual_seed(1)
held_out = torch.randn(200, 2, generator=g)

task = mh.Task(
    model=build,
    loss=loss,
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    data=sums,
    held_out={"pair": held_out, "sum": held_out.sum(dim=1)},
)

config = mh.RunConfig(
    train=mh.TrainConfig(batch=64, micro_batch=8, steps=150),
    data=mh.DataConfig(shuffle_window=256),
)
