# SPDX-License-Identifier: Apache-2.0
"""How bytes move between workers. The adding is not done here, so every way gives the same bits."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Lanes = dict[torch.dtype, Tensor]
"""A flat vector: one tensor per dtype."""

Bounds = dict[torch.dtype, tuple[int, int]]
"""A stretch of each lane."""

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a collective must make room for."""

    lanes: dict[torch.dtype, int]
    """Elements of the gradient vector, per dtype."""
    slots: int
    """The most partial sums one worker can hold."""
    message_bytes: int
    """The largest message that is gathered."""


class Collective(Protocol):
    """Called by every worker of a view, in the same order.

    Per step: `gather` (small facts; on return every worker has filled its slots), `exchange`,
    further `gather`s if need be, then `share`. A worker that must not wait any longer gets
    `Broken` raised out of whichever call it is in.
    """

    slots: Sequence[Lanes]
    """This worker's partial sums of gradients; written by the worker before `gather`."""

    def gather(self, mine: Bytes) -> list[Bytes]:
        """Everyone's message, by rank; all are of equal length. Valid until the call after next."""
        ...

    def exchange(self, counts: Sequence[int], owned: Sequence[Bounds]) -> list[list[Lanes]]:
        """Of every rank's first `counts[rank]` slots, the stretch that this worker owns.

        What is returned may be overwritten by the caller: nobody else reads it.
        """
        ...

    def share(self, weights: Lanes, owned: Sequence[Bounds]) -> None:
        """Make the stretch of `weights` that each worker owns known to all of them."""
        ...

    def abort(self) -> None:
        """Wake whoever waits here; callable from another thread."""
        ...

    def close(self) -> None: ...


def stretch(lanes: Lanes, bounds: Bounds) -> Lanes:
    return {dtype: lanes[dtype][start:stop] for dtype, (start, stop) in bounds.items()}
