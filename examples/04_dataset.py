# SPDX-License-Identifier: Apache-2.0
"""A map-style Dataset that shifts and dims its images at random.

Its random numbers come from torch, numpy and random as anywhere else; they are seeded for each
micro-batch, so the same record of the same step is shifted the same way on any number of workers.

manyhands train examples/04_dataset.py --to runs/shifted --workers 2
"""

import random

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from torchmetrics.classification import MulticlassAccuracy

import manyhands as mh

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16


class Digits(Dataset[tuple[Tensor, int]]):
    def __init__(self, numbers: range, augment: bool) -> None:
        self.numbers, self.augment = numbers, augment

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        number = self.numbers[index]
        image, label = images[number], int(digits.target[number])
        if self.augment:
            image = torch.roll(image, (random.choice([-1, 0, 1]), np.random.randint(-1, 2)), (1, 2))
            image = image * (0.8 + 0.4 * torch.rand(()))
        return image, label


def build() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 4 * 4, 10),
    )


task = mh.Task(
    model=build,
    loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    data=Digits(range(1400), augment=True),
    held_out=Digits(range(1400, 1797), augment=False),
    predict=lambda model, batch: (model(batch[0]), batch[1]),
    scores={"accuracy": MulticlassAccuracy(10, average="micro")},
)

config = mh.RunConfig(train=mh.TrainConfig(batch=50, micro_batch=10, epochs=10))
