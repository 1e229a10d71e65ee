# SPDX-License-Identifier: Apache-2.0
"""How workers come to agree on one set of weights."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from manyhands.deal import Cut, MicroBatch
from manyhands.train.leaf import LossFn
from manyhands.train.optim import SharedOut

CHANGING_NAMES = (
    "the loss returned differently named numbers for different micro-batches of a step. Return the "
    "same names every time."
)
MIXED_WEIGHTS = "the loss returned a weight for some micro-batches and none for others."


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What all workers know about a step once its gradients are in place; equal on all of them."""

    loss: float
    records: int
    agreed: int
    """Number of the last command that every worker has heard."""
    numbers: Mapping[str, float] = field(default_factory=dict[str, float])


class Sync(Protocol):
    """The loop calls `backward` and `step` once per optimizer step, in that order, on every worker.

    `setup` comes first, once. When `step` returns, this worker may read the new weights; whether
    the others are at the same step is the strategy's promise, and its docstring says which.
    """

    optimizer: SharedOut
    """This worker's part of the optimizer: what it must save, and load before `setup`."""

    def setup(self) -> None:
        """Start from what the replica's model holds; on return all have the same weights."""
        ...

    def indices(self, cut: Cut) -> range:
        """Which micro-batches of a step are this worker's."""
        ...

    def backward(self, cut: Cut, micro_batches: Iterable[MicroBatch], loss: LossFn) -> StepFacts:
        """Compute this worker's micro-batches (in index order) and learn the step's facts."""
        ...

    def step(self) -> None:
        """Finish the gradient and update the weights and buffers."""
        ...

    def close(self) -> None: ...
