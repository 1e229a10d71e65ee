# SPDX-License-Identifier: Apache-2.0
"""A character-level GPT that learns to write Python, from the source of a module of Python's own.

Plain PyTorch: causal attention, dropout, the embedding tied to the output, a rate that rises and
falls. A record is a window of the text; the next window begins half a window later.

manyhands train examples/15_char_gpt.py --to runs/gpt --workers 2
"""

import inspect
import textwrap

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import manyhands as mh

TEXT = inspect.getsource(textwrap)
LETTERS = sorted(set(TEXT))
LENGTH, STEPS = 64, 300


def windows(text: str) -> Tensor:
    numbers = {letter: number for number, letter in enumerate(LETTERS)}
    return torch.tensor([numbers[letter] for letter in text]).unfold(0, LENGTH + 1, LENGTH // 2)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, nn.Dropout(dropout)
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.before(x)).chunk(3, dim=2)
        q, k, v = (t.unflatten(2, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(seen.transpose(1, 2).flatten(2)))
        return x + self.dropout(self.mlp(self.between(x)))


class Gpt(nn.Module):
    def __init__(self, width: int = 64, layers: int = 2, dropout: float = 0.1) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(len(LETTERS), width), nn.Embedding(LENGTH, width)
        for table in (self.letters, self.places):
            nn.init.normal_(table.weight, std=0.02)
        self.blocks = nn.Sequential(*(Block(width, 4, dropout) for _ in range(layers)))
        self.norm, self.next = nn.LayerNorm(width), nn.Linear(width, len(LETTERS), bias=False)
        self.next.weight = self.letters.weight  # tied

    def forward(self, text: Tensor) -> Tensor:
        x = self.letters(text) + self.places(torch.arange(text.shape[1]))
        return self.next(self.norm(self.blocks(x)))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    text = batch["text"]
    return F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


task = mh.Task(
    model=Gpt,
    loss=loss,
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3),
    schedule=lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, STEPS),
    data={"text": windows(TEXT[:-2000])},
    held_out={"text": windows(TEXT[-2000:])},
)

config = mh.RunConfig(train=mh.TrainConfig(batch=32, micro_batch=8, steps=STEPS, clip_norm=1.0))
