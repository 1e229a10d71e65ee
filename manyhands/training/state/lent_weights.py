# SPDX-License-Identifier: Apache-2.0
"""The model's own parameters, lent to code of the user's that writes to them: an optimizer that is
left whole, or what is called after a step."""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor

from manyhands.training.state.layout import Lanes, TensorPlace
from manyhands.values.errors import OptimizerRefused

Lendable = tuple[Tensor, Tensor, TensorPlace]
"""A weight as it can be written to, the module's parameter, and where it lies."""


def lendable(
    pieces: Iterable[TensorPlace], parameters: Mapping[str, Tensor], weights: Lanes
) -> list[Lendable]:
    return [(piece.view(weights[piece.dtype]), parameters[piece.name], piece) for piece in pieces]


@contextmanager
def writable(
    lent: Sequence[Lendable],
    *,
    whose: str = "the optimizer",
    keep: Callable[[TensorPlace], None] = lambda piece: None,
) -> Generator[None]:
    """The module's own parameters may be written to, as an optimizer that is left whole does it:
    in place, or by giving them other memory, whose values are then taken over. `keep` is told
    before those are."""
    shown = [parameter.data for _, parameter, _ in lent]
    for weight, parameter, _ in lent:
        parameter.data = weight
    yield
    for (weight, parameter, piece), before in zip(lent, shown, strict=True):
        found = parameter.data
        if found.shape != weight.shape or found.dtype != weight.dtype:
            raise OptimizerRefused(
                f"{whose} made a {str(found.dtype).removeprefix('torch.')}"
                f"{list(found.shape)} of parameter '{piece.name}', which was a "
                f"{str(weight.dtype).removeprefix('torch.')}{list(weight.shape)}."
            )
        if found.data_ptr() != weight.data_ptr() or found.stride() != weight.stride():
            if not piece.trainable:
                keep(piece)
            weight.copy_(found)
        parameter.data = before
