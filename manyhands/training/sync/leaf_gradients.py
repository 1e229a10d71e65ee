# SPDX-License-Identifier: Apache-2.0
"""How the micro-batches of a step become the leaves of its sum: one by one, or (for a loss over the
whole batch, cached_gradients.py) after all workers have come to know what the others hold."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Protocol

from manyhands.accounting.deal_micro_batches import Cut, MicroBatch
from manyhands.training.collective.collective import Bytes
from manyhands.training.compute.micro_batch_gradient import Leaf, LossFn, compute
from manyhands.training.state.replica import Replica
from manyhands.values.config import TrainConfig

GatherBytes = Callable[[Bytes], list[Bytes]]
"""Everyone's message, by rank; all are of equal length, at most that of `most_bytes`. What is
returned is valid until the next call but one."""

Fetch = Callable[[int], MicroBatch]
"""Any micro-batch of a step, by its index."""


class LeafGradients(Protocol):
    """In each step every worker of a view calls `begin` once, with its own micro-batches, and then
    `compute` for those that it gave back, in index order. After `compute` the parameters' `.grad`
    hold what the micro-batch adds to the sum of the step."""

    most_bytes: int
    """The largest message that `begin` gathers."""

    def begin(
        self,
        cut: Cut,
        micro_batches: Iterable[MicroBatch],
        loss: LossFn,
        gather: GatherBytes | None,
    ) -> Iterable[MicroBatch]:
        """`gather` is None for a worker that has the whole batch."""
        ...

    def compute(
        self,
        cut: Cut,
        micro_batch: MicroBatch,
        loss: LossFn,
        during: AbstractContextManager[None] | None = None,
    ) -> Leaf:
        """`during` is entered around backward."""
        ...

    def compute_alone(self, cut: Cut, index: int, fetch: Fetch, loss: LossFn) -> Leaf:
        """Any micro-batch, whoever it is dealt to: in the step that was begun, or in none."""
        ...

    def forget(self) -> None:
        """What others told in `begin`: what is computed next comes from this worker alone."""
        ...


class PlainGradients:
    """A loss of one micro-batch at a time."""

    most_bytes = 0

    def __init__(self, replica: Replica, train: TrainConfig, *, takes_buffers: bool = True) -> None:
        """`takes_buffers`: a step of a single micro-batch leaves the buffers as it finds them
        afterwards. Else they are merged there too."""
        self.takes_buffers = takes_buffers
        self.replica, self.seed, self.precision = replica, train.seed, train.precision

    def begin(
        self,
        cut: Cut,
        micro_batches: Iterable[MicroBatch],
        loss: LossFn,
        gather: GatherBytes | None,
    ) -> Iterable[MicroBatch]:
        return micro_batches

    def compute(
        self,
        cut: Cut,
        micro_batch: MicroBatch,
        loss: LossFn,
        during: AbstractContextManager[None] | None = None,
    ) -> Leaf:
        replica = self.replica
        replica.tables.begin()
        replica.buffers.begin(alone=len(cut.sizes) == 1 and self.takes_buffers)
        with replica.guard:
            return compute(
                replica.model,
                micro_batch,
                loss,
                seed=self.seed,
                precision=self.precision,
                scale=self.replica.loss_scale.value,
                during=during,
            )

    def compute_alone(self, cut: Cut, index: int, fetch: Fetch, loss: LossFn) -> Leaf:
        return self.compute(cut, fetch(index), loss)

    def forget(self) -> None: ...
