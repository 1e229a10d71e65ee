# SPDX-License-Identifier: Apache-2.0
"""Handwritten digits and a small CNN.

manyhands train examples/01_digits.py --to runs/first --workers 2
"""

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
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.classify = nn.Sequential(nn.Flatten(), nn.Dropout(0.3), nn.Linear(32 * 4 * 4, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classify(self.features(x))


digits = load_digits()  # 1,797 images of 8 x 8, inside scikit-learn
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)

task = mh.Task(
    model=Net,
    loss=lambda model, batch: F.cross_entropy(model(batch["image"]), batch["label"]),
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3),
    data={"image": images, "label": labels},
    held_out=0.2,
    predict=lambda model, batch: (model(batch["image"]), batch["label"]),
    scores={"accuracy": MulticlassAccuracy(10, average="micro")},
)

config = mh.RunConfig(train=mh.TrainConfig(batch=64, micro_batch=8, epochs=5))
