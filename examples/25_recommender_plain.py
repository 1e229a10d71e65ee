# SPDX-License-Identifier: Apache-2.0
"""The recommender of 24_recommender.py in a plain loop, to compare: one process, `nn.Embedding`
with sparse gradients, torch.optim.Adagrad for the rows and the same Adam for the rest.

torch has no FTRL: the wide part has Adagrad too. Its ids are numbered first, because nn.Embedding
needs a row for each number below the largest.

python examples/25_recommender_plain.py [epochs]
"""

import sys
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from manyhands.zoo import movielens

recommender = import_module("24_recommender")
Batch = dict[str, Tensor]


class Tables:
    """Makes tables for a model, and the optimizer of their rows."""

    def __init__(self, most: int = 200_000) -> None:
        self.most, self.groups = most, list[dict[str, Any]]()

    def __call__(self, rows: int, dim: int, *, init: Any, lr: float, **_: Any) -> nn.Embedding:
        table = nn.Embedding(min(rows, self.most), dim, sparse=True)
        nn.init.normal_(table.weight, std=0.0 if init == "zeros" else init)
        self.groups.append({"params": [table.weight], "lr": lr})
        return table

    def optimizers(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        rows = {id(group["params"][0]) for group in self.groups}
        dense = [p for p in model.parameters() if id(p) not in rows]
        return [torch.optim.Adagrad(self.groups), torch.optim.Adam(dense, lr=1e-3)]


def numbered(records: Batch) -> Batch:
    ids = {name: records[name].unique(return_inverse=True)[1] for name in ("about", "pairs")}
    return {**records, **ids}


def step(model: nn.Module, optimizers: list[torch.optim.Optimizer], batch: Batch) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()
    recommender.loss(model, batch).backward()
    for optimizer in optimizers:
        optimizer.step()


def train(kind: str, data: Batch, *, epochs: int = 6, batch: int = 512, dim: int = 16) -> nn.Module:
    torch.manual_seed(0)
    tables = Tables()
    model = {"mf": recommender.Factors, "wide_deep": recommender.WideDeep}[kind](dim, tables)
    optimizers = tables.optimizers(model)
    with torch.sparse.check_sparse_tensor_invariants(False):
        for _ in range(epochs):
            for records in torch.randperm(len(data["user"])).split(batch):
                step(model, optimizers, {name: column[records] for name, column in data.items()})
    return model


def score(kind: str, model: nn.Module, held_out: Batch) -> float:
    task = recommender.task(kind)
    (metric,) = task.scores.values()
    with torch.no_grad():
        return float(metric(*task.predict(model, held_out)))


def main() -> None:
    torch.set_num_threads(1)  # more of them cost more than they give in steps as small as these
    epochs = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    data, held_out = movielens.split(numbered(movielens.with_pairs(movielens.ratings())))
    for kind, name in (("mf", "RMSE"), ("wide_deep", "AUC")):
        print(f"{name} {score(kind, train(kind, data, epochs=epochs), held_out):.4f}")


if __name__ == "__main__":
    main()
