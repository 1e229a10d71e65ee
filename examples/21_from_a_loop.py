# SPDX-License-Identifier: Apache-2.0
"""Digits, from a loop over a DataLoader: docs/coming_from.md has the loop.

manyhands train examples/21_from_a_loop.py --to runs/loop --workers 2
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import manyhands as mh

digits = load_digits()
x = torch.tensor(digits.data, dtype=torch.float32) / 16
train = TensorDataset(x[:1500], torch.tensor(digits.target[:1500]))
test = TensorDataset(x[1500:], torch.tensor(digits.target[1500:]))

task = mh.Task(
    model=lambda: nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10)),
    loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3),
    schedule=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7),
    schedule_every="epoch",
    data=train,
    held_out=test,
    predict=lambda model, batch: (model(batch[0]), batch[1]),
    scores={"accuracy": lambda said, y: (said.argmax(1) == y).float().mean()},
)
config = {"train": {"batch": 64, "epochs": 5}}
