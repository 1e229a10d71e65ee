# SPDX-License-Identifier: Apache-2.0
"""A WGAN with a gradient penalty: two optimizers, each with a loss of its own.

The critic takes a step in every round, the generator in every third. Both see the same batch.

manyhands train examples/13_gan.py --to runs/gan --workers 2 --set train.epochs=2
"""

from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import manyhands as mh

NOISE = 16


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(NOISE, 64), nn.ReLU(), nn.Linear(64, 64), nn.Sigmoid()
        )
        self.critic = nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))

    def fake(self, batch: Any) -> Tensor:
        return self.generator(torch.randn(len(batch["x"]), NOISE))


def critic_loss(model: Gan, batch: Any) -> Any:
    real, fake = batch["x"], model.fake(batch).detach()
    mix = torch.rand(len(real), 1)
    between = (mix * real + (1 - mix) * fake).requires_grad_()
    (slope,) = torch.autograd.grad(model.critic(between).sum(), between, create_graph=True)
    penalty = (slope.norm(2, dim=1) - 1).square().mean()
    distance = model.critic(real).mean() - model.critic(fake).mean()
    return 10 * penalty - distance, {"distance": distance.detach()}


def generator_loss(model: Gan, batch: Any) -> Any:
    return -model.critic(model.fake(batch)).mean()


digits = load_digits()

task = mh.Task(
    model=Gan,
    optimizer={
        "critic": lambda m: torch.optim.Adam(m.critic.parameters(), 1e-3, betas=(0.0, 0.9)),
        "generator": lambda m: torch.optim.Adam(m.generator.parameters(), 1e-3, betas=(0.0, 0.9)),
    },
    loss={"critic": critic_loss, "generator": generator_loss},
    every={"generator": 3},
    data={"x": torch.tensor(digits.data, dtype=torch.float32) / 16},
)
config = {"train": {"batch": 64, "micro_batch": 16, "epochs": 1}}
