"""The task of a run folder: BatchNorm, dropout, AdamW, a schedule; records of a prepared folder."""

from pathlib import Path

import torch
from torch import nn

import manyhands as mh


def model():
    return nn.Sequential(
        nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2)
    )


def loss(model, batch):
    x = torch.stack([batch["age"], batch["height"], batch["colour"].float()], 1)
    return nn.functional.cross_entropy(model(x), batch["label"])


def optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


task = mh.Task(
    model=model,
    data=str(Path(__file__).parent / "people"),
    loss=loss,
    optimizer=optimizer,
    schedule=lambda o: torch.optim.lr_scheduler.StepLR(o, 500),
)
