# SPDX-License-Identifier: Apache-2.0
"""The works of the benchmarks: models, losses and made-up data, the same for every contestant.

Data come from a fixed seed and are small (at most 13 MB), so that neither making them nor holding
them decides about start-up or memory. Every work has a whole number of batches in an epoch.

Dims: B records, T tokens, D width, H heads, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LEARNING_RATE = 1e-3
WORKERS = 2

Batch = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Work:
    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Batch], Tensor]
    data: Callable[[], Batch]
    per_worker: int
    """Records that each worker computes in a step."""
    steps: int
    """Enough for 6-10 s on a slow core."""

    @property
    def batch(self) -> int:
        return WORKERS * self.per_worker


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    )


def tower() -> nn.Module:
    """4.2 million parameters in equal layers: their gradients come evenly, all through backward."""
    layers = [layer for _ in range(15) for layer in (nn.Linear(512, 512), nn.ReLU())]
    return nn.Sequential(nn.Linear(512, 512), nn.ReLU(), *layers, nn.Linear(512, 10))


def cnn() -> nn.Module:
    def convolution(inward: int, outward: int) -> list[nn.Module]:
        return [
            nn.Conv2d(inward, outward, 3, padding=1, bias=False),
            nn.BatchNorm2d(outward),
            nn.ReLU(),
        ]

    return nn.Sequential(
        *convolution(3, 32),
        *convolution(32, 64),
        nn.MaxPool2d(2),
        *convolution(64, 128),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128 * 8 * 8, 10),
    )


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x_BTD: Tensor) -> Tensor:  # noqa: N803 (the shape is in the name)
        qkv = self.qkv(self.before_attention(x_BTD)).chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in qkv)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.out(seen.transpose(1, 2).flatten(2))  # noqa: N806
        return x_BTD + self.mlp(self.before_mlp(x_BTD))


class GPT(nn.Module):
    """4.2 million parameters; the output layer is the embedding."""

    def __init__(
        self,
        width: int = 256,
        layers: int = 4,
        heads: int = 4,
        vocabulary: int = 4096,
        length: int = 128,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, tokens_BT: Tensor) -> Tensor:  # noqa: N803
        places = torch.arange(tokens_BT.shape[1])
        return self.head(self.norm(self.blocks(self.embed(tokens_BT) + self.position(places))))


def classify(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def next_token(model: nn.Module, batch: Batch) -> Tensor:
    tokens = batch["tokens"]
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def images(records: int, *shape: int) -> Batch:
    dice = torch.Generator().manual_seed(1)
    x = torch.randn(records, *shape, generator=dice)
    return {"x": x, "y": torch.randint(0, 10, (records,), generator=dice)}


def text(records: int, length: int, vocabulary: int) -> Batch:
    dice = torch.Generator().manual_seed(2)
    return {"tokens": torch.randint(0, vocabulary, (records, length), generator=dice)}


WORKS = {
    "mlp": Work(mlp, classify, lambda: images(4096, 784), per_worker=128, steps=600),
    "tower": Work(tower, classify, lambda: images(4096, 512), per_worker=512, steps=60),
    "cnn": Work(cnn, classify, lambda: images(1024, 3, 32, 32), per_worker=64, steps=40),
    "gpt": Work(GPT, next_token, lambda: text(1024, 129, 4096), per_worker=8, steps=20),
}
