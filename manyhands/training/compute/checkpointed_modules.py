# SPDX-License-Identifier: Apache-2.0
"""Modules that keep no activations: backward computes them again (`train.checkpoint_activations`).

It is torch's `checkpoint(use_reentrant=False, preserve_rng_state=True)` around the forward of each.
What computes twice must do so alike, and count once. So the second time, in backward, the module
finds what it found the first time: its buffers, and the generators of numpy and random beside those
of torch. Afterwards all of that is as forward left it: a BatchNorm counts a batch once.
"""

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module
from torch.utils.checkpoint import checkpoint

from manyhands.values.errors import ConfigError
from manyhands.values.plain_names import plain_name
from manyhands.values.toml_values import nearest

SETTING = "train.checkpoint_activations"


def checkpoint_modules(model: Module, patterns: Sequence[str]) -> list[str]:
    """Let the modules that are meant compute again in backward what they do not keep; their names.
    A pattern is a path in which `*` and the like stand for one part: `layers.*`, `*.attention`."""
    named = [(plain_name(n), m) for n, m in model.named_modules(remove_duplicate=False) if n]
    found: dict[int, tuple[str, Module]] = {}
    for pattern in patterns:
        meant = {id(m): (name, m) for name, m in named if _means(pattern, name)}
        if not meant:
            raise ConfigError(
                f"{SETTING}: the model has no module '{pattern}'{nearest(pattern, _names(named))}"
            )
        found |= meant
    for _, module in found.values():
        module.forward = partial(_checkpointed, module, module.forward)
    return [name for name, _ in found.values()]


def _means(pattern: str, name: str) -> bool:
    wanted, parts = pattern.split("."), name.split(".")
    return len(wanted) == len(parts) and all(map(fnmatchcase, parts, wanted))


def _names(named: Sequence[tuple[str, Module]]) -> list[str]:
    """The first few levels of them, each once."""
    return list(dict.fromkeys(name for name, _ in named))[:40]


def _checkpointed(module: Module, forward: Callable[..., Any], *args: Any, **named: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **named)
    return checkpoint(
        forward,
        *args,
        use_reentrant=False,
        preserve_rng_state=True,
        context_fn=partial(_both_times, module),
        **named,
    )


def _both_times(
    module: Module,
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """What is entered around forward, and around the same in backward."""
    return nullcontext(), _AsItWas(module)


class _AsItWas:
    """A module's buffers and what draws, as they were when this was made: for the time being, and
    as often as it is entered (a penalty on gradients goes backward twice)."""

    def __init__(self, module: Module) -> None:
        held = [(part._buffers, name) for part in module.modules() for name in part._buffers]  # pyright: ignore[reportPrivateUsage]
        self._then = _State(held)

    def __enter__(self) -> None:
        self._now = _State(self._then.held)
        self._then.put_back()

    def __exit__(self, *error: object) -> None:
        self._now.put_back()


class _State:
    def __init__(self, held: Sequence[tuple[dict[str, Tensor | None], str]]) -> None:
        """`held`: the dicts that hold buffers, and their names there."""
        self.held = held
        self.tensors = [holder.get(name) for holder, name in held]
        self.copies = [None if t is None else t.detach().clone() for t in self.tensors]
        self.draws = random.getstate(), np.random.get_state()

    def put_back(self) -> None:
        for (holder, name), tensor, copy in zip(self.held, self.tensors, self.copies, strict=True):
            holder[name] = tensor
            if tensor is not None and copy is not None:
                tensor.data.copy_(copy)  # .data: who saved it for backward need not know
        random.setstate(self.draws[0])
        np.random.set_state(self.draws[1])
