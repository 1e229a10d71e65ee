"""A small click log, and a task that learns from it."""

import random
from pathlib import Path

NAMES = ("id", "user", "age", "hour", "clicked")

TASK = """
import torch
from torch import nn
from torch.nn import functional as F
import manyhands as mh


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.user, self.head = nn.Embedding(40, 4), nn.Linear(6, 1)

    def forward(self, batch):
        rest = torch.stack([batch["age"], batch["hour"]], 1)
        return self.head(torch.cat([self.user(batch["user"]), rest], 1)).squeeze(1)


task = mh.Task(
    model=Net,
    loss=lambda m, b: F.binary_cross_entropy_with_logits(m(b), b["clicked"].float()),
    optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=0.05),
    data=r"{data}",
    predict=lambda m, b: (m(b), b["clicked"]),
    scores={{"accuracy": lambda p, t: ((p > 0).long() == t).float().mean()}},
)
"""


def write_clicks(path: Path, records: int, *, seed: int = 1, label: bool = True) -> None:
    draw = random.Random(seed)
    lines = [",".join(NAMES if label else NAMES[:-1])]
    for k in range(records):
        user, age, hour = draw.randrange(30), draw.randrange(18, 80), draw.randrange(24)
        clicked = ",yes" if age > 45 or user < 5 else ",no"
        lines.append(f"{k},u{user},{age},{hour}{clicked * label}")
    path.write_text("\n".join(lines) + "\n")
