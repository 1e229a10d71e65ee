# SPDX-License-Identifier: Apache-2.0
"""Modules of a model by their plain paths, past the wrappers of torch.compile."""

from torch.nn import Module

from manyhands.values.plain_names import WRAPPED, plain_name

_IN_PLACE = "_compiled_call_impl"
"""Where `module.compile()` leaves what it made."""


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


def without_compilers(model: Module) -> tuple[Module, bool]:
    """A model as it was before its owner compiled it, or parts of it; and whether that was so."""
    found = _unwrapped(model)
    compiled = found is not model
    for module in found.modules():
        for name, child in list(module._modules.items()):  # pyright: ignore[reportPrivateUsage]
            if child is not None and (plain := _unwrapped(child)) is not child:
                module._modules[name], compiled = plain, True  # pyright: ignore[reportPrivateUsage]
    for module in found.modules():
        if vars(module).get(_IN_PLACE) is not None:
            setattr(module, _IN_PLACE, None)
            compiled = True
    return found, compiled


def _unwrapped(module: Module) -> Module:
    while WRAPPED in (inner := module._modules):  # pyright: ignore[reportPrivateUsage]
        found = inner[WRAPPED]
        assert found is not None
        module = found
    return module
