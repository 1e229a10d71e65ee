# SPDX-License-Identifier: Apache-2.0
"""A loss over the whole batch, on any number of workers: gradient caching.

    embed        every worker computes the embeddings of its micro-batches, and drops their graphs
    gather       every worker gets the embeddings of all micro-batches, in index order
    batch loss   each computes the loss of the whole batch, and its gradient by every embedding:
                 the same bits everywhere, so nobody has to be told
    again        each micro-batch is computed once more, to the same bits (it has the same seed),
                 and backward goes on with the gradient of its own rows

What must hold:

- A leaf is what `.grad` holds after a micro-batch's own backward; it is not scaled, because the
  loss is the whole batch's already. What batch_loss itself does with parameters (a temperature) is
  added to the leaf of micro-batch 0, before its backward, by whoever computes it: it counts once.
- The loss is told once as well: micro-batch 0 weighs 1 and the others nothing.
- Both passes start from the step's committed buffers, and what the first does to them is thrown
  away. batch_loss sees committed ones, and must leave them alone.
- The first pass records graphs and drops them: some kernels (LSTM) compute other bits where no
  gradient is wanted, and then the gradient would be taken at another place.
- Nothing is changed before the second pass is over. Who dies between them costs one step's work.

A worker's batches of a step stay in memory between the passes.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from manyhands.accounting.deal_micro_batches import Cut, MicroBatch
from manyhands.training.compute.micro_batch_gradient import Leaf, LossFn, read_loss
from manyhands.training.compute.seeds import seed_everything
from manyhands.training.state.replica import Replica
from manyhands.training.sync.gather_embeddings import (
    PIECE_BYTES,
    Embedded,
    joined,
    same_rows,
    share_embeddings,
)
from manyhands.training.sync.leaf_gradients import Fetch, GatherBytes
from manyhands.values.config import TrainConfig
from manyhands.values.errors import EmbeddingsDiffer, LossNotFinite, TaskError
from manyhands.values.forked_children import one_process
from manyhands.values.task import BatchLoss


class BetweenPasses(Protocol):
    """Who watches a worker: told of the batch loss, and of micro-batches that come again."""

    def batch_loss(self, step: Cut) -> None: ...
    def again(self, step: Cut, micro_batches: Sequence[MicroBatch]) -> Iterator[MicroBatch]: ...


class _Batch:
    """What all micro-batches of a step have in common: after the batch loss, on every worker."""

    def __init__(
        self, everyone: Sequence[Embedded], loss: float, numbers: dict[str, float]
    ) -> None:
        self.everyone, self.loss, self.numbers = everyone, loss, numbers
        self.gradients: list[list[Tensor | None]] = []
        """Of each micro-batch, by embedding."""
        self.direct: dict[str, Tensor] = {}
        """By parameter: what batch_loss does with it itself."""


class CachedGradients:
    most_bytes = PIECE_BYTES

    def __init__(self, replica: Replica, train: TrainConfig, watch: BetweenPasses) -> None:
        self.replica, self.train, self.watch = replica, train, watch
        self.device = next((p.device for p in replica.model.parameters()), torch.device("cpu"))
        self._known: tuple[int, _Batch] | None = None
        self._rehearsed: set[str] = set()

    def begin(
        self,
        cut: Cut,
        micro_batches: Iterable[MicroBatch],
        loss: LossFn,
        gather: GatherBytes | None,
    ) -> Iterable[MicroBatch]:
        self.forget()
        kept: list[MicroBatch] = []
        mine: list[Embedded] = []
        for micro_batch in micro_batches:
            kept.append(micro_batch)
            mine.append(self._embedded(cut, micro_batch, loss))
        everyone = mine if gather is None else share_embeddings(mine, gather)
        self.watch.batch_loss(cut)
        self._known = cut.step, self._batch(cut, everyone, loss)
        return self.watch.again(cut, kept)

    def compute(
        self,
        cut: Cut,
        micro_batch: MicroBatch,
        loss: LossFn,
        during: AbstractContextManager[None] | None = None,
    ) -> Leaf:
        assert self._known is not None and self._known[0] == cut.step, "begin comes first"
        replica, batch, index = self.replica, self._known[1], micro_batch.index
        replica.tables.begin()
        replica.buffers.begin(alone=len(cut.sizes) == 1)
        self._rehearse("again")
        with replica.guard:
            made = self._embed(micro_batch, loss)
            if self.device.type == "cpu" and not same_rows(
                [t.detach() for t in made], batch.everyone[index].tensors
            ):
                raise EmbeddingsDiffer(cut.step, index)
            pairs = zip(made, batch.gradients[index], strict=True)
            wanted = [(t, g) for t, g in pairs if t.requires_grad and g is not None]
            if index == 0:
                for name, gradient in batch.direct.items():
                    replica.parameters[name].grad = gradient.clone()
            with one_process(), during or nullcontext():
                if wanted:
                    tensors, gradients = zip(*wanted, strict=True)
                    _Handed.apply(gradients, *tensors).backward()
        return Leaf(batch.loss, 1.0 if index == 0 else 0.0, batch.numbers)

    def compute_alone(self, cut: Cut, index: int, fetch: Fetch, loss: LossFn) -> Leaf:
        begun = self._known is not None and self._known[0] == cut.step
        if not begun:
            indices = range(len(cut.sizes))
            everyone = [self._embedded(cut, fetch(k), loss) for k in indices]
            self._known = cut.step, self._batch(cut, everyone, loss)
        leaf = self.compute(cut, fetch(index), loss)
        if not begun:
            self.forget()
        return leaf

    def forget(self) -> None:
        self._known = None

    # ---- the first pass

    def _embedded(self, cut: Cut, micro_batch: MicroBatch, loss: LossFn) -> Embedded:
        self.replica.buffers.begin(alone=len(cut.sizes) == 1)
        with self.replica.guard:
            made = self._embed(micro_batch, loss)
        trained = tuple(tensor.requires_grad for tensor in made)
        return Embedded(tuple(tensor.detach().cpu() for tensor in made), trained)

    def _embed(self, micro_batch: MicroBatch, loss: LossFn) -> tuple[Tensor, ...]:
        seed_everything(self.train.seed, micro_batch.step, micro_batch.index, "forward")
        with one_process(), self._autocast():
            return read_embeddings(_of_batch(loss).embed(self.replica.model, micro_batch.batch))

    # ---- the loss of the whole batch

    def _batch(self, cut: Cut, everyone: Sequence[Embedded], loss: LossFn) -> _Batch:
        replica = self.replica
        rows = joined(everyone, self.device)
        replica.tables.begin()
        replica.buffers.begin(alone=True)
        self._rehearse("batch loss")
        with replica.guard:
            seed_everything(self.train.seed, cut.step, "batch loss")
            with one_process(), self._autocast():
                returned = _of_batch(loss).batch_loss(replica.model, *rows)
                value, weight, numbers = read_loss(returned, "batch_loss")
            if weight is not None:
                raise TaskError(
                    "batch_loss returned a weight. There is nothing to weigh it against: it is the "
                    "loss of the whole batch. Return the loss, or (loss, numbers)."
                )
            if not value.requires_grad:
                raise TaskError(
                    "batch_loss does not depend on any weight that is trained: it was detached, "
                    "computed under torch.no_grad() or from numbers, or embed detached what it "
                    "returned. Return it as computed from the embeddings."
                )
            with one_process():
                value.backward()
        if (table := replica.tables.looked_up()) is not None:
            raise TaskError(
                f"batch_loss looks up rows of '{table}'. Do it in embed, so that whoever holds the "
                "records computes what their rows receive."
            )
        if written := replica.buffers.written():
            raise TaskError(
                f"batch_loss changes '{written[0]}' of the model (a BatchNorm, or a buffer that is "
                "written to). Only what embed does to buffers is merged and kept: do it there."
            )
        batch = _Batch(everyone, value.item(), numbers)
        self._see_that_it_is_finite(cut, batch)
        for name, parameter in replica.parameters.items():
            if parameter.grad is not None:
                batch.direct[name], parameter.grad = parameter.grad, None
        sizes = [[len(t) for t in e.tensors] for e in everyone]
        by_tensor = [
            [None] * len(sizes) if t.grad is None else t.grad.split([s[k] for s in sizes])
            for k, t in enumerate(rows)
        ]
        batch.gradients = [list(of_one) for of_one in zip(*by_tensor, strict=True)]
        return batch

    def _see_that_it_is_finite(self, cut: Cut, batch: _Batch) -> None:
        """Every worker sees the same; the first one reports it."""
        if math.isfinite(batch.loss) or self.train.not_finite == "skip":
            return
        for index, embedded in enumerate(batch.everyone):
            if not all(bool(t.isfinite().all()) for t in embedded.tensors):
                raise LossNotFinite(0, cut.step, index, batch.loss, ())
        raise LossNotFinite(0, cut.step, None, batch.loss, ())

    def _rehearse(self, what: str) -> None:
        """What is done here for the first time is looked at as a first micro-batch is."""
        if what not in self._rehearsed:
            self._rehearsed.add(what)
            self.replica.guard.afresh()

    def _autocast(self) -> torch.autocast:
        enabled = self.train.precision == "bf16"
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=enabled)


def _of_batch(loss: LossFn) -> BatchLoss:
    assert isinstance(loss, BatchLoss)
    return loss


class _Handed(torch.autograd.Function):
    """A number whose gradient by each of the tensors is the one that is handed over, as it is."""

    @staticmethod
    def forward(ctx: Any, gradients: tuple[Tensor, ...], *tensors: Tensor) -> Tensor:
        ctx.gradients = gradients
        return torch.zeros((), device=tensors[0].device)

    @staticmethod
    def backward(ctx: Any, *of_number: Any) -> Any:
        return None, *ctx.gradients


def read_embeddings(returned: Any) -> tuple[Tensor, ...]:
    """One tensor, or several."""
    made = tuple(returned) if isinstance(returned, tuple | list) else (returned,)
    for tensor in made:
        if not isinstance(tensor, Tensor) or tensor.dim() == 0 or tensor.is_sparse:
            given = type(tensor).__name__
            if isinstance(tensor, Tensor):
                given = "a sparse tensor" if tensor.is_sparse else "a tensor without rows"
            raise TaskError(
                f"embed returned {given}; it must return a tensor with a row for each record, or a "
                "tuple of such tensors (labels among them, where batch_loss needs them)."
            )
    if not made:
        raise TaskError("embed returned an empty tuple; batch_loss would have nothing to compare.")
    return made
