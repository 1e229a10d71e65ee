# SPDX-License-Identifier: Apache-2.0
"""Text: a small LSTM that learns to write sums, a loss over tokens, and a schedule.

The lines differ in length. Their loss is a mean over the letters that are there, so it says how
many those were: `(mean, weight)`. Micro-batches then count by their letters, not by their lines.

manyhands train examples/03_text.py --to runs/text --workers 2
"""

import random

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import manyhands as mh

LETTERS = "\0\n0123456789+="
PAD, STEPS = 0, 150


def lines(count: int, seed: int) -> Tensor:
    """Such as `7+58=65`, one row each, padded."""
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        a, b = draw.randrange(100), draw.randrange(100)
        text = f"\n{a}+{b}={a + b}\n".ljust(12, "\0")
        rows.append([LETTERS.index(letter) for letter in text])
    return torch.tensor(rows)


class Writer(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(LETTERS), width, padding_idx=PAD)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.next = nn.Linear(width, len(LETTERS))

    def forward(self, letters: Tensor) -> Tensor:
        return self.next(self.lstm(self.embed(letters))[0])


def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    targets = batch["text"][:, 1:]
    scores = model(batch["text"][:, :-1])
    mean = F.cross_entropy(scores.transpose(1, 2), targets, ignore_index=PAD)
    return mean, (targets != PAD).sum(), {"perplexity": mean.detach().exp()}


def predict(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return model(batch["text"][:, :-1]).argmax(2), batch["text"][:, 1:]


def letters_right(predictions: Tensor, targets: Tensor) -> Tensor:
    return (predictions == targets)[targets != PAD].float().mean()


task = mh.Task(
    model=Writer,
    loss=loss,
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    schedule=lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, STEPS),
    data={"text": lines(4000, seed=1)},
    held_out={"text": lines(400, seed=2)},
    predict=predict,
    scores={"letters_right": letters_right},
)

config = mh.RunConfig(train=mh.TrainConfig(batch=128, steps=STEPS, clip_norm=1.0))
