# SPDX-License-Identifier: Apache-2.0
"""Two towers: which lower half of a digit belongs to which upper half?

Every half is told from the 63 others of its batch, whichever workers computed them: the embeddings
of all micro-batches are gathered, and the loss is taken once, over the whole batch. How strictly it
judges is a temperature that is learned too.

manyhands train examples/14_two_towers.py --to runs/halves --workers 2
"""

from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import manyhands as mh

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32) / 16


def tower() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(32, 256),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(256, 64),
    )


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.upper, self.lower = tower(), tower()
        self.temperature = nn.Parameter(torch.tensor(2.0))


def embed(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    upper = F.normalize(model.upper(batch["upper"]), dim=1)
    return upper, F.normalize(model.lower(batch["lower"]), dim=1)


def batch_loss(model: Any, upper: Tensor, lower: Tensor) -> Any:
    scores = upper @ lower.T * model.temperature.exp()
    mine = torch.arange(len(scores))
    loss = (F.cross_entropy(scores, mine) + F.cross_entropy(scores.T, mine)) / 2
    return loss, {"found": (scores.argmax(1) == mine).float().mean()}


def found(upper: Tensor, lower: Tensor) -> Tensor:
    """How many upper halves have their own lower half among the ten that are nearest."""
    scores = upper @ lower.T
    return (scores.topk(10).indices == torch.arange(len(upper))[:, None]).any(1).float().mean()


task = mh.Task(
    model=Towers,
    embed=embed,
    batch_loss=batch_loss,
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=2e-3),
    data={"upper": images[:1500, :4], "lower": images[:1500, 4:]},
    held_out={"upper": images[1500:, :4], "lower": images[1500:, 4:]},
    predict=embed,
    scores={"found in ten": found},
)

config = mh.RunConfig(
    train=mh.TrainConfig(batch=64, micro_batch=8, epochs=20),
    evaluate=mh.EvaluateConfig(batch=64),
)
