# SPDX-License-Identifier: Apache-2.0
"""A recommender on real ratings (MovieLens 100k), with tables of rows by id.

`mf`, matrix factorisation: which rating does somebody give a film? (RMSE) `wide_deep`: is it 4 or
more? (AUC) A weight for each pair of, say, person and genre, and an MLP over rows of both.

manyhands train examples/24_recommender.py --to runs/mf --workers 2
manyhands train examples/24_recommender.py --to runs/wide --workers 2 --param kind=wide_deep
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MeanSquaredError
from torchmetrics.classification import BinaryAUROC

import manyhands as mh
from manyhands.zoo import movielens

Batch = dict[str, Tensor]


class Factors(nn.Module):
    def __init__(self, dim: int, table: type[nn.Module] = mh.Embedding) -> None:
        super().__init__()
        self.user, self.item = (table(100_000, dim, init=0.05, lr=0.05) for _ in range(2))
        self.mood, self.fame = (table(100_000, 1, init="zeros", lr=0.05) for _ in range(2))
        self.mean = nn.Parameter(torch.tensor(3.5))

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        user, item = self.user(batch["user"]), self.item(batch["item"])
        biases = torch.cat([self.mood(batch["user"]), self.fame(batch["item"])], 1)
        sizes = torch.cat([user, item, biases], 1).square().sum(1)
        return self.mean + biases.sum(1) + (user * item).sum(1), sizes


class WideDeep(nn.Module):
    def __init__(self, dim: int, table: type[nn.Module] = mh.Embedding) -> None:
        super().__init__()
        self.wide = table(1_000_000, 1, init="zeros", optimizer="ftrl", lr=0.02, beta=1e-3, l1=5e-4)
        self.user, self.item = (table(100_000, dim, init=0.05, lr=0.02) for _ in range(2))
        self.about = table(1000, dim, init=0.05, lr=0.02)
        self.deep = nn.Sequential(nn.Linear(6 * dim, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, batch: Batch) -> Tensor:
        about = self.about(batch["about"])
        rows = [self.user(batch["user"]), self.item(batch["item"]), about[:, :3].flatten(1)]
        deep = self.deep(torch.cat([*rows, about[:, 3:].sum(1)], 1))
        return (deep + self.wide(batch["pairs"]).sum(1)).squeeze(1)


def loss(model: nn.Module, batch: Batch) -> Tensor:
    if isinstance(model, Factors):
        made, sizes = model(batch)
        return F.mse_loss(made, batch["rating"]) + 0.05 * sizes.mean()
    return F.binary_cross_entropy_with_logits(model(batch), (batch["rating"] >= 4).float())


def predict(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    if isinstance(model, Factors):
        return model(batch)[0], batch["rating"]
    return model(batch), (batch["rating"] >= 4).long()


def task(kind: str = "mf", dim: int = 16) -> mh.Task:
    factors = {"mf": True, "wide_deep": False}[kind]
    data, held_out = movielens.split(movielens.with_pairs(movielens.ratings()))
    return mh.Task(
        model=lambda: Factors(dim) if factors else WideDeep(dim),
        loss=loss,
        optimizer=lambda m: torch.optim.Adam(m.parameters(), lr=1e-3),
        data=data,
        held_out=held_out,
        predict=predict,
        scores={"rmse": MeanSquaredError(squared=False)} if factors else {"auc": BinaryAUROC()},
    )


config = mh.RunConfig(train=mh.TrainConfig(batch=512, micro_batch=128, epochs=6))
