# SPDX-License-Identifier: Apache-2.0
"""What in a user's model or data could make the result depend on who computed it.

Three things cannot be controlled from outside and are looked for, so that people are told once,
at the start, which module it is and why it matters: random generators of one's own, weights that
the seed does not determine, and state that forward keeps in plain attributes.
"""

import random
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from manyhands.values.plain_names import plain_name

GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def _modules(model: Module) -> Iterator[tuple[str, Module]]:
    return ((plain_name(path), module) for path, module in model.named_modules())


def private_generators(model: Module, data: Any) -> list[str]:
    """A sentence for each generator that a module or the data set holds for itself."""
    holders: list[tuple[str, Any]] = [
        (f"module '{name}' ({type(m).__name__})" if name else f"the model ({type(m).__name__})", m)
        for name, m in _modules(model)
    ]
    if hasattr(data, "__dict__"):
        holders.append((f"the data set ({type(data).__name__})", data))
    return [
        f"{where} has a random generator of its own, '{name}'. What it draws depends on what this "
        "worker computed before, so the weights may depend on the number of workers. Draw from "
        "torch, numpy.random or random themselves: those are seeded for every micro-batch"
        for where, holder in holders
        for name, value in vars(holder).items()
        if isinstance(value, GENERATORS)
    ]


def marks(parameters: Mapping[str, Tensor]) -> dict[str, int]:
    """A checksum of each parameter."""
    found: dict[str, int] = {}
    for name, parameter in parameters.items():
        raw: Any = parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        found[name] = zlib.crc32(raw)
    return found


def unlike(first: Mapping[str, int], others: Sequence[Mapping[str, int]]) -> str | None:
    """The first parameter that was not initialised alike everywhere, as a sentence."""
    for name, mark in first.items():
        if any(other.get(name) != mark for other in others):
            return (
                f"parameter '{name}' was initialised differently on different workers: its first "
                "value does not come from the seed. All workers go on from the leader's, but "
                "another run of this task will differ"
            )
    return None


class PlainState:
    """Numbers and tensors in plain attributes of modules: does forward change them?"""

    def __init__(self, model: Module) -> None:
        self.before = dict(_plain(model))
        self.model = model

    def changed(self) -> list[str]:
        return [
            f"{where} changes '{name}' in forward, which is neither parameter nor buffer: it is "
            "not merged between workers and not saved. Use register_buffer, or keep it out of the "
            "computation"
            for (where, name), value in _plain(self.model)
            if self.before.get((where, name), value) != value
        ]


def _plain(model: Module) -> Iterator[tuple[tuple[str, str], Any]]:
    for path, module in _modules(model):
        where = f"module '{path}' ({type(module).__name__})" if path else "the model"
        for name, value in vars(module).items():
            if name.startswith("_") or name == "training":
                continue
            if isinstance(value, bool | int | float | str):
                yield (where, name), value
            elif isinstance(value, Tensor) and value.grad_fn is None:
                # With a history it was made by this forward, as weight_norm makes its weight.
                yield (where, name), (id(value), value._version)
