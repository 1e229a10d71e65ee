# SPDX-License-Identifier: Apache-2.0
"""`nn.Embedding(max_norm=...)`: rows that are longer are shortened before they are used.

Plain PyTorch does it in place, in forward, whenever a row is looked up: weights written outside the
optimizer. Here the same numbers come about without that:

- a micro-batch looks rows up in a copy of the table, in which those it uses are shortened;
- which ones these were, and by which factor, is noted, and merged over all micro-batches of the
  step like a buffer. A row's factor follows from the step's weights alone, so whoever used it
  found the same one; a row that nobody used keeps 1;
- the update shortens those rows, once, and then takes the optimizer's step on them.

With one micro-batch a step this is plain PyTorch, to the last bit. Scoring uses a copy too, and
leaves the weights as they are.
"""

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Embedding, EmbeddingBag, Module, Parameter

from manyhands.training.state.layout import parameters_of
from manyhands.training.state.module_paths import modules_of
from manyhands.values.errors import TaskError


class MaxNormRows:
    """One such module. `factors`: of each row, in the micro-batch that is computed."""

    def __init__(self, path: str, module: Embedding | EmbeddingBag) -> None:
        self.path, self.module = path, module
        self.parameter = cast(Parameter, module.weight)
        self.max_norm, self.norm_type = float(module.max_norm or 0.0), float(module.norm_type)
        self.factors = torch.ones(len(module.weight), dtype=torch.float64)
        self.recording = False
        module.register_forward_pre_hook(self._before)
        module.register_forward_hook(self._after, always_call=True)

    @property
    def name(self) -> str:
        """Of the parameter."""
        return f"{self.path}.weight" if self.path else "weight"

    def _before(self, module: Module, arguments: tuple[Any, ...]) -> None:
        weight = self.parameter
        rows = torch.unique(arguments[0])
        norms = torch.linalg.vector_norm(weight.detach()[rows], self.norm_type, dim=1).double()
        long = norms > self.max_norm
        # Not number / tensor: torch multiplies by the reciprocal then, and rounds otherwise.
        rows, most = rows[long], torch.full_like(norms[long], self.max_norm)
        factors = most / (norms[long] + 1e-7)
        if self.recording:
            self.factors[rows.cpu()] = factors.cpu()
        self.module.max_norm = None
        if len(rows):
            del module._parameters["weight"]  # pyright: ignore[reportPrivateUsage]
            vars(module)["weight"] = _Shortened.apply(weight, rows, factors)

    def _after(self, module: Module, arguments: tuple[Any, ...], output: Any) -> None:
        self.module.max_norm = self.max_norm
        if vars(module).pop("weight", None) is not None:
            module._parameters["weight"] = self.parameter  # pyright: ignore[reportPrivateUsage]


class _Shortened(torch.autograd.Function):
    """The table with some rows shortened; gradients go to the table as if it were this one."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, rows: Tensor, factors: Tensor) -> Tensor:
        table = weight.clone()
        table[rows] *= factors[:, None].to(table.dtype)
        return table

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None, None


def shorten(stretch: Tensor, offset: int, width: int, factors: Tensor) -> None:
    """Shorten rows of a table, of which `stretch` holds the elements from `offset` on."""
    first, stop = offset // width, -(-(offset + len(stretch)) // width)
    mine = factors[first:stop]
    if bool((mine == 1.0).all()):
        return
    skip = offset - first * width
    each = mine.repeat_interleave(width)[skip : skip + len(stretch)].to(stretch.device)
    stretch.mul_(each.to(stretch.dtype))


def find_max_norms(model: Module) -> list[MaxNormRows]:
    """All of a model; refuses those whose weights somebody else uses too."""
    found: list[MaxNormRows] = []
    names: dict[int, list[str]] = {}
    for name, parameter, _ in parameters_of(model):
        names.setdefault(id(parameter), []).append(name)
    for path, module in modules_of(model):
        if not isinstance(module, Embedding | EmbeddingBag) or module.max_norm is None:
            continue
        if type(module).forward not in (Embedding.forward, EmbeddingBag.forward):
            continue  # what it does with its weights is its own affair, and is watched
        weight, where = module.weight, f"module '{path}' ({type(module).__name__})"
        if "weight" not in module._parameters:  # pyright: ignore[reportPrivateUsage]
            raise TaskError(f"{where} has max_norm and a parametrized weight. Use one of them.")
        if len(names[id(weight)]) > 1:
            tied = " and ".join(f"'{n}'" for n in names[id(weight)])
            raise TaskError(
                f"{where} has max_norm, and its weight is tied: {tied}. Shortening rows would "
                "change what the other computes, in an order that depends on who computes what. "
                "Untie them, or drop max_norm."
            )
        if not weight.requires_grad or not weight.is_contiguous():
            kind = "frozen" if not weight.requires_grad else "not contiguous"
            raise TaskError(
                f"{where} has max_norm, and its weight is {kind}. Shorten its rows once, when the "
                "model is built (torch.renorm), and drop max_norm."
            )
        found.append(MaxNormRows(path, module))
    return found
