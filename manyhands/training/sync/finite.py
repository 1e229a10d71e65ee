# SPDX-License-Identifier: Apache-2.0
"""Only finite gradients are applied.

A loss can be finite and its gradient not (sqrt at 0, 0/0 behind a `where`). One look at each
worker's partial sums, before anybody writes a weight, decides for everybody:

- a number in them that is not finite is in the whole sum too, whatever is added to it;
- if even the sum of everybody's largest numbers is far from the largest there is, the whole sum is
  finite. Else it is looked at itself, which costs a meeting, and nearly never happens.
"""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

SAFE = 0.25
"""Of the largest number of a dtype."""


def reach(lanes: Iterable[Tensor]) -> float:
    """The largest absolute value, as a part of the largest finite number of its dtype; infinity
    when one is not finite."""
    found = 0.0
    for lane in lanes:
        if lane.numel() == 0:
            continue
        real = torch.view_as_real(lane) if lane.is_complex() else lane
        low, high = (float(x) for x in torch.aminmax(real))
        largest = max(abs(low), abs(high))
        if not math.isfinite(low + high):  # a NaN is both; infinities may cancel to one
            return math.inf
        found = max(found, largest / torch.finfo(real.dtype).max)
    return found


def may_overflow(reaches: Sequence[float], total: float | None) -> bool:
    """Whether the sum of what has these reaches, divided by `total`, might not be finite."""
    most = math.fsum(reaches)
    return most >= SAFE * (1.0 if total is None else min(1.0, total))
