# SPDX-License-Identifier: Apache-2.0
"""Rare digits drawn as often as common ones: a WeightedRandomSampler, or weights.

Of nine digits only a tenth of the records is kept. Every epoch draws 1500 records by their weights,
by a function of seed, epoch and position, so the same ones on any number of workers; what an
epoch's positions are is in the ledger: manyhands ledger runs/weighted --check

manyhands train examples/11_weighted.py --to runs/weighted --workers 2
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import WeightedRandomSampler
from torchmetrics.classification import MulticlassAccuracy

import manyhands as mh

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)

held_out = torch.arange(len(labels)) >= 1400
rare = (labels != 3) & (torch.arange(len(labels)) % 10 != 0)
kept = ~held_out & ~rare

counts = torch.bincount(labels[kept], minlength=10)
weights = 1.0 / counts[labels[kept]].double()

task = mh.Task(
    model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
    loss=lambda model, batch: F.cross_entropy(model(batch["image"]), batch["label"]),
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    data={"image": images[kept], "label": labels[kept]},
    sampler=WeightedRandomSampler(weights.tolist(), num_samples=1500),
    held_out={"image": images[held_out], "label": labels[held_out]},
    predict=lambda model, batch: (model(batch["image"]), batch["label"]),
    scores={"accuracy": MulticlassAccuracy(10, average="macro")},
)

config = mh.RunConfig(train=mh.TrainConfig(batch=50, micro_batch=10, epochs=4))
