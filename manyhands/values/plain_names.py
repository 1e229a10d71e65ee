# SPDX-License-Identifier: Apache-2.0
"""What a tensor of a model is called: as in the plain model, whoever compiled it or parts of it.

`torch.compile(module)` wraps a module in another one, which holds it as `_orig_mod`; so a
state_dict then says `_orig_mod.layers.0.weight`. Messages, layouts, checkpoints and fingerprints
know only `layers.0.weight`: a compiled model is trained, and a plain one loads it.
"""

WRAPPED = "_orig_mod"


def plain_name(name: str) -> str:
    """A tensor's or a module's name (its path) without the wrappers on the way to it."""
    return (
        ".".join(part for part in name.split(".") if part != WRAPPED) if WRAPPED in name else name
    )
