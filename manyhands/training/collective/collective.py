# SPDX-License-Identifier: Apache-2.0
"""How bytes move between workers. The adding is not done here, so every way gives the same bits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from manyhands.training.state.layout import Bounds, Lanes

PRIVATE = ("gloo", "nccl", "none")
"""Ways in which no worker shares memory with another."""

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


FACTS, NORMS, OUTCOMES, EMBEDDINGS, ROWS = KINDS = range(5)
"""Kinds of messages; each has a place of its own, so that one does not overwrite another."""


class Patience(Protocol):
    """How long a worker may wait for others. Entered while it waits, so that others can tell."""

    def broken(self) -> bool:
        """Asked from time to time by whoever waits: should it give up?"""
        ...

    def __enter__(self) -> object: ...
    def __exit__(self, *error: object) -> object: ...


Meanwhile = Callable[[], None]


def nothing() -> None: ...


class Collective(Protocol):
    """Called by every worker of a view, in the same order.

    Per step: `gather` (small facts; on return every worker has filled its slots), `exchange`,
    further `gather`s if need be, then `share`. A worker that must not wait any longer gets
    `Broken` raised out of whichever call it is in.
    """

    slots: Sequence[Lanes]
    """This worker's partial sums of gradients; written by the worker before `gather`."""

    def gather(
        self, mine: Bytes, kind: int = FACTS, stamp: int = 0, meanwhile: Meanwhile = nothing
    ) -> list[Bytes]:
        """Everyone's message, by rank; all are of equal length.

        Valid until the next call of the same kind but one. `meanwhile` is called once, while the
        others are waited for.
        """
        ...

    def exchange(self, counts: Sequence[int], owned: Sequence[Bounds]) -> list[list[Lanes]]:
        """Of every rank's first `counts[rank]` slots, the stretch that this worker owns.

        What is returned is not to be written to: it may be needed once more.
        """
        ...

    def share(self, lanes: Lanes, owned: Sequence[Bounds]) -> None:
        """Make the stretch of `lanes` that each worker owns known to all of them."""
        ...

    def recall(self, kind: int, stamp: int) -> list[Bytes]:
        """What was gathered last with this stamp, by whichever view, in the order of its ranks.

        Only memory that outlives its workers remembers; others give nothing.
        """
        ...

    def left_by(self, rank: int) -> Sequence[Lanes]:
        """The partial sums that the worker of this rank wrote, in this view or the one before."""
        ...

    def close(self) -> None: ...


def stretch(lanes: Lanes, bounds: Bounds) -> Lanes:
    return {dtype: lanes[dtype][start:stop] for dtype, (start, stop) in bounds.items()}
