"""Small tasks with everything that makes exactness hard. Top-level, so that they pickle."""

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import manyhands as mh

RECORDS = 101


def images(channels: int = 3, size: int = 8, n: int = RECORDS) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(7)
    x = torch.randn(n, channels, size, size, generator=g)
    return {"x": x, "y": torch.randint(0, 5, (n,), generator=g)}


def tokens(n: int = RECORDS, length: int = 12, vocabulary: int = 40) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(8)
    return {"t": torch.randint(0, vocabulary, (n, length), generator=g)}


def classify(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def next_token(model: nn.Module, batch: Any) -> Tensor:
    t = batch["t"]
    return F.cross_entropy(model(t[:, :-1]).flatten(0, 1), t[:, 1:].flatten())


class ConvNet(nn.Module):
    """BatchNorm (one shared by two layers, one with a plain average), dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.average = nn.BatchNorm1d(8, momentum=None)
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)))
        x = F.relu(self.norm(self.second(x)))
        return self.head(self.dropout(self.average(x.mean((2, 3)))))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        self.lstm = nn.LSTM(16, 16, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(16, 40)

    def forward(self, t: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(t))[0])


class Tied(nn.Module):
    """A transformer whose output layer is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 40, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.ones(16, 16).triu(1).bool())

    def forward(self, t: Tensor) -> Tensor:
        n = t.shape[1]
        return self.head(self.encoder(self.embed(t), mask=self.mask[:n, :n]))


class Odd(nn.Module):
    """A frozen layer, one that some micro-batches and steps never touch, and odd buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(12, 12).requires_grad_(False)
        self.sometimes = nn.Linear(12, 12)
        self.never = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(12))
        self.head = nn.Linear(12, 5)
        self.register_buffer("mean_seen", torch.zeros(12))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("recent", torch.zeros(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(x.flatten(1)[:, :12]) * self.scale
        if self.training:
            self.mean_seen.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
            self.calls += 1
            self.recent = x.detach()[0, :3].clone()
        # Decided by the data of the micro-batch: touched in some, not in others.
        if float(x.detach().sum()) > 1.0:
            x = x + self.sometimes(x)
        return self.head(x + self.recent.sum())


class Shortened(nn.Module):
    """Rows of its table are shortened when they are used: in forward, says PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 60, max_norm=0.7)
        self.head = nn.Linear(60, 40)

    def forward(self, t: Tensor) -> Tensor:
        return self.head(self.table(t))


class Towers(nn.Module):
    """BatchNorm and dropout in the towers, and a temperature that only the batch loss uses."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = ConvNet(), nn.Sequential(nn.Flatten(), nn.Linear(192, 5))
        self.heat = nn.Parameter(torch.zeros(()))


def embed_sides(model: Towers, batch: Any) -> tuple[Tensor, Tensor]:
    x = batch["x"]
    return model.left(x), F.dropout(model.right(x.flip(-1)), 0.1)


def tell_apart(model: Towers, left: Tensor, right: Tensor) -> Any:
    scores = F.normalize(left, dim=1) @ F.normalize(right, dim=1).T * model.heat.exp()
    mine = torch.arange(len(scores))
    value = F.cross_entropy(scores, mine) + F.cross_entropy(scores.T, mine)
    return value, {"seen": float(len(scores)), "right": (scores.argmax(1) == mine).float().mean()}


class Factors(nn.Module):
    """Two tables of rows, and something dense beside them."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.user = mh.Embedding(4000, 8, init=0.3, **settings)
        self.item = mh.Embedding(4000, 5, init=(-0.4, 0.4), **settings)
        self.join = nn.Linear(13, 6)
        self.head = nn.Linear(6, 1)

    def forward(self, user: Tensor, items: Tensor) -> Tensor:
        both = torch.cat([self.user(user), self.item(items).sum(1)], 1)
        return self.head(torch.tanh(self.join(both))).squeeze(1)


def ratings(n: int = 256, seed: int = 3) -> dict[str, Tensor]:
    """Users are any 64-bit numbers; of items there are several in a record, some of them twice."""
    g = torch.Generator().manual_seed(seed)
    user = torch.randint(0, 40, (n,), generator=g) ** 2 * 0x9E3779B97F4A7 - (1 << 50)
    return {
        "user": user,
        "items": torch.randint(0, 30, (n, 3), generator=g),
        "y": torch.randn(n, generator=g),
    }


def rate(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch["user"], batch["items"]), batch["y"])


def odd_optimizer(model: Odd) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        [
            {"params": [model.scale, *model.sometimes.parameters()], "weight_decay": 0.0},
            {"params": [*model.head.parameters(), *model.never.parameters()], "lr": 3e-3},
        ],
        lr=1e-2,
    )


class Augmented(Dataset[dict[str, Tensor]]):
    """Random augmentation from torch, numpy and random."""

    def __init__(self) -> None:
        self.data = images()

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        x = self.data["x"][i] + 0.1 * torch.randn(3, 8, 8)
        x = x * float(np.random.uniform(0.9, 1.1))
        if random.random() < 0.5:
            x = x.flip(-1)
        return {"x": x, "y": self.data["y"][i]}


class OwnOptimizer(torch.optim.SGD):
    """A subclass could do anything, so it is left whole."""


def one_cycle(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=400)


def clip(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.clamp_(-0.1, 0.1)


def clipped() -> mh.Task:
    """Its weights are clipped after each step."""
    return mh.Task(
        model=ConvNet,
        loss=classify,
        optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2),
        after_step=clip,
        data=images(),
    )


def make(kind: str) -> mh.Task:
    optim = torch.optim
    match kind:
        case "cnn":
            return mh.Task(
                model=ConvNet,
                loss=classify,
                optimizer=lambda m: optim.AdamW(m.parameters(), lr=1e-2),
                data=images(),
            )
        case "cnn-sgd":
            return mh.Task(
                model=lambda: ConvNet().to(memory_format=torch.channels_last),
                loss=classify,
                optimizer=lambda m: optim.SGD(m.parameters(), lr=0.05, momentum=0.9),
                data=images(),
            )
        case "lstm":
            return mh.Task(
                model=Recurrent,
                loss=next_token,
                optimizer=lambda m: optim.AdamW(m.parameters(), lr=1e-2, fused=True),
                data=tokens(),
            )
        case "transformer":
            return mh.Task(
                model=Tied,
                loss=next_token,
                optimizer=lambda m: optim.Adafactor(m.parameters(), lr=1e-2),
                data=tokens(),
            )
        case "max_norm":
            return mh.Task(
                model=Shortened,
                loss=next_token,
                optimizer=lambda m: optim.AdamW(m.parameters(), lr=1e-2),
                data=tokens(),
            )
        case "odd":
            return mh.Task(
                model=Odd,
                loss=classify,
                optimizer=odd_optimizer,
                schedule=one_cycle,
                data=images(),
            )
        case "wide":
            return mh.Task(
                model=lambda: nn.Sequential(
                    nn.Flatten(), nn.Linear(192, 333), nn.GELU(), nn.Linear(333, 5)
                ),
                loss=classify,
                optimizer=lambda m: optim.AdamW(m.parameters(), lr=1e-2),
                data=images(),
            )
        case "own":
            return mh.Task(
                model=ConvNet,
                loss=classify,
                optimizer=lambda m: OwnOptimizer(m.parameters(), lr=1e-2, momentum=0.9),
                data=images(),
            )
        case "towers":
            return mh.Task(
                model=Towers,
                embed=embed_sides,
                batch_loss=tell_apart,
                optimizer=lambda m: optim.AdamW(m.parameters(), lr=1e-2),
                data=images(),
                held_out=images(n=40),
            )
        case "rows":
            return mh.Task(
                model=Factors,
                loss=rate,
                optimizer=lambda m: optim.AdamW(m.parameters(), lr=3e-2),
                data=ratings(),
            )
        case "clipped":
            return clipped()
        case "augmented":
            return mh.Task(
                model=ConvNet,
                loss=lambda m, b: (classify(m, b), float(b["y"].sum()) + 1.0, {"n": len(b["y"])}),
                optimizer=lambda m: optim.AdamW(m.parameters(), lr=1e-2),
                data=Augmented(),
            )
    raise ValueError(kind)
