"""What models of the catalogue are made of."""

# pyright: basic

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.catalogue.case import mlp

Way = Callable[[Any, Tensor], Tensor]
"""From a model and its input to its output."""


class Net(nn.Module):
    """Modules and parameters by name, and a function that uses them."""

    def __init__(self, forward: Way, **parts: Any) -> None:
        super().__init__()
        self.way = forward
        for name, part in parts.items():
            if isinstance(part, nn.Module | nn.Parameter):
                setattr(self, name, part)
            elif isinstance(part, Tensor):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, x)


def param(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, dtype=dtype) * 0.3)


def with_layer(wrap: Callable[[nn.Module], Any]) -> Callable[[], nn.Module]:
    """An MLP whose first layer went through `wrap`."""

    def build() -> nn.Module:
        net: Any = mlp()
        wrap(net[0])
        return net

    return build


def row_norm(norm: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(6, 8), norm(), nn.ReLU(), nn.Linear(8, 3))


def conv_norm(norm: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), norm(), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
    )


def embedding(**options: Any) -> Callable[[], nn.Module]:
    return lambda: Net(
        lambda m, t: m.head(m.embed(t).mean(1)),
        embed=nn.Embedding(20, 8, **options),
        head=nn.Linear(8, 3),
    )


def bag(**options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.EmbeddingBag(20, 8, **options), nn.Linear(8, 3))


def net(
    way: Callable[[Any, Tensor], Tensor], **parts: Callable[[], Any]
) -> Callable[[], nn.Module]:
    """Parts are made when the model is built, so that the seed decides them."""
    return lambda: Net(way, **{name: part() for name, part in parts.items()})


def linear(width: int, out: int) -> Callable[[], nn.Module]:
    return lambda: nn.Linear(width, out)


def vector(*shape: int) -> Tensor:
    return torch.zeros(*shape)


HEAD = linear(6, 3)
