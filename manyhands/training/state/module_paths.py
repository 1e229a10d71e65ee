# SPDX-License-Identifier: Apache-2.0
"""Modules of a model by their plain paths, past the wrappers of torch.compile."""

from torch.nn import Module

from manyhands.values.plain_names import WRAPPED, plain_name


def modules_of(model: Module) -> list[tuple[str, Module]]:
    """All of them but wrappers, the model itself first, under the name ''."""
    return [
        (plain_name(path), module)
        for path, module in model.named_modules()
        if WRAPPED not in module._modules  # pyright: ignore[reportPrivateUsage]
    ]


def module_at(model: Module, path: str) -> Module:
    """The module that holds what `path`, a plain path, leads to."""
    found = _unwrapped(model)
    for part in path.split(".") if path else ():
        found = _unwrapped(found.get_submodule(part))
    return found


def _unwrapped(module: Module) -> Module:
    while isinstance(inner := module._modules.get(WRAPPED), Module):  # pyright: ignore[reportPrivateUsage]
        module = inner
    return module
