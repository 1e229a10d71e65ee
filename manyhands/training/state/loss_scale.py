# SPDX-License-Identifier: Apache-2.0
"""By what a loss is multiplied before backward, so that small gradients survive in half precision.

It is `torch.amp.GradScaler`'s: 2**16 at first; halved by a step whose gradients are not finite (it
is not taken); doubled when 2,000 steps in a row were. A power of two, always: gradients are divided
by it again, exactly, in the finished sum, before clipping.

What it is now follows from which steps were skipped. It is kept as one more buffer (state_of), so
it outlives workers, reaches hosts and late joiners, and is saved and loaded, as buffers are.
"""

import torch
from torch import Tensor

from manyhands.values.errors import GradientNotFinite

NAME = "(loss scale)"
"""Among the buffers. No buffer of a module has such a name."""

INITIAL, GROWTH_INTERVAL = 2.0**16, 2000
LARGEST = 2.0**127
"""Of float32, in which torch keeps it."""
HOPELESS = 2.0**-16
"""A gradient that is not finite with a scale below this was not made so by it."""


def first_state() -> Tensor:
    """[scale, steps taken since it last changed], as a run begins."""
    return torch.tensor([INITIAL, 0.0], dtype=torch.float64)


class LossScale:
    def __init__(self, state: Tensor | None) -> None:
        """`state`: the committed one, which is changed in place; None: losses are not scaled."""
        self.state = state

    @property
    def value(self) -> float:
        return 1.0 if self.state is None else float(self.state[0])

    def excuses(self, error: Exception | None) -> bool:
        """Whether it may be the cause, so that the step is skipped and the run goes on."""
        found = isinstance(error, GradientNotFinite) and self.state is not None
        return found and self.value >= HOPELESS

    def after(self, *, skipped: bool) -> None:
        """A step was taken, or skipped."""
        if self.state is None:
            return
        scale, taken = (float(number) for number in self.state)
        if skipped:
            scale, taken = scale * 0.5, 0.0
        elif (taken := taken + 1) == GROWTH_INTERVAL:
            scale, taken = min(scale * 2.0, LARGEST), 0.0
        self.state[0], self.state[1] = scale, taken
