# SPDX-License-Identifier: Apache-2.0
"""Handwritten digits (scikit-learn's, 1,797 images of 8×8): a small CNN, about 98-99 % right."""

from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy

import manyhands as mh


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classify = nn.Sequential(nn.Flatten(), nn.Dropout(0.3), nn.Linear(64 * 4 * 4, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classify(self.features(x))


digits: Any = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)

task = mh.Task(
    model=Net,
    loss=lambda model, batch: F.cross_entropy(model(batch["image"]), batch["label"]),
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3),
    schedule=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12 * 23),
    data={"image": images, "label": labels},
    held_out=0.2,
    predict=lambda model, batch: (model(batch["image"]), batch["label"]),
    scores={"accuracy": MulticlassAccuracy(10, average="micro")},
)

config = mh.RunConfig(
    train=mh.TrainConfig(batch=64, micro_batch=16, epochs=12),
    checkpoint=mh.CheckpointConfig(every_steps=100, keep_best="accuracy"),
    evaluate=mh.EvaluateConfig(every_steps=100),
)
