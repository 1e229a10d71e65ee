# SPDX-License-Identifier: Apache-2.0
"""Kernels of torch, on CPUs, that are replaced by functions of ours, in the whole process.

Autograd, autocast and everything else above a kernel stay as they are. A replacement gets the
original as a function of the same arguments, for what it does not want to compute itself.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch

Replacement = Callable[..., Any]
"""(original, *all arguments, in the order of the schema) → what the original would return, in other
bits. `out` comes last."""


class KernelSet:
    """Those that this process has replaced. Nothing is undone: libraries choose once, too."""

    def __init__(self) -> None:
        self.library = torch.library.Library("aten", "IMPL")
        self.names: set[str] = set()

    @staticmethod
    def possible() -> bool:
        return hasattr(torch.library, "get_kernel")

    def replace(self, name: str, kernel: Replacement) -> None:
        original = torch.library.get_kernel(f"aten::{name}", "CPU")
        packet, _, overload = name.partition(".")
        schema = getattr(getattr(torch.ops.aten, packet), overload or "default")._schema
        defaults = {a.name: a.default_value for a in schema.arguments}
        positions = [a.name for a in schema.arguments if not a.kwarg_only]
        named_only = [a.name for a in schema.arguments if a.kwarg_only]

        def replacement(keys: Any, *given: Any, **named: Any) -> Any:
            def as_before(*arguments: Any) -> Any:
                by_name = dict(zip(named_only, arguments[len(positions) :], strict=True))
                return original.call_boxed(keys, *arguments[: len(positions)], **by_name)

            values = {**defaults, **dict(zip(positions, given, strict=False)), **named}
            return kernel(as_before, *values.values())

        with warnings.catch_warnings():  # torch warns that there is a kernel already; so we wish
            warnings.simplefilter("ignore")
            self.library.impl(name, replacement, "CPU", with_keyset=True)
        self.names.add(name)
