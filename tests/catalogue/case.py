"""One entry of the catalogue: a task in plain PyTorch, and what it is meant to show."""

# pyright: basic

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

RECORDS = 29
"""Two batches of 12 records in 4 micro-batches, and one of 5 in two uneven ones."""


def rows(records: int = RECORDS, width: int = 6, classes: int = 3) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(7)
    x = torch.randn(records, width, generator=g)
    y = torch.randint(0, classes, (records,), generator=g)
    return {"x": x, "y": y, "i": torch.arange(records)}


def pictures(records: int = RECORDS, channels: int = 3, size: int = 4) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(8)
    x = torch.randn(records, channels, size, size, generator=g)
    return {"x": x, "y": torch.randint(0, 3, (records,), generator=g)}


def tokens(records: int = RECORDS, length: int = 7, vocabulary: int = 20) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(9)
    t = torch.randint(0, vocabulary, (records, length), generator=g)
    return {"x": t, "y": t[:, 0] % 3}


def classify(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(trained, lr=0.1, momentum=0.9)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Those of `[train]` that are part of the result."""

    batch: int = 12
    micro_batch: int = 3
    epochs: int = 2
    seed: int = 5
    clip_norm: float | None = None
    precision: str = "fp32"


@dataclass(frozen=True)
class Case:
    name: str
    shows: str
    _: KW_ONLY
    model: Any = mlp
    """As a task's: a function that builds it, or the module itself."""
    loss: Callable[[Any, Any], Any] | dict[str, Any] = classify
    """Of one micro-batch; not used where there is a batch_loss."""
    embed: Callable[[Any, Any], Any] | None = None
    batch_loss: Callable[..., Any] | None = None
    """Of the whole batch, from what `embed` made of its micro-batches."""
    optimizer: Callable[[Any], Any] | dict[str, Any] = adamw
    schedule: Callable[[Any], Any] | dict[str, Any] | None = None
    schedule_every: str = "step"
    every: dict[str, int] = field(default_factory=dict)
    offset: dict[str, int] = field(default_factory=dict)
    share_batch: bool = True
    data: Any = field(default_factory=rows)
    collate: Callable[[list[Any]], Any] | None = None
    settings: Settings = Settings()
    refused: str | None = None
    """A pattern in what is said when it is refused; None: it trains, to the same bits."""
    xfail: str | None = None
    """It should be so and is not yet, and why."""
    slow: bool = False
