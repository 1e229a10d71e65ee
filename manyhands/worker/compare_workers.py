# SPDX-License-Identifier: Apache-2.0
"""Workers are compared with each other: what they have built, and what they compute."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from manyhands.accounting.deal_micro_batches import Cut
from manyhands.data.reading.records import Records, sampled_digest
from manyhands.training.compute import nondeterminism
from manyhands.training.compute.micro_batch_gradient import Leaf, LossFn, compute, digest
from manyhands.training.state.optimizer_kinds import how_to_cut
from manyhands.training.state.replica import Replica
from manyhands.training.sync.sync import Moment
from manyhands.values.config import TrainConfig
from manyhands.values.errors import TaskError
from manyhands.values.kernels import Kernels
from manyhands.values.messages import Built
from manyhands.worker.watched_feed import WatchedFeed


def describe(replica: Replica, records: Records, kernels: Kernels) -> bytes:
    """For a worker that has just built these."""
    marks = nondeterminism.marks(replica.parameters)
    built = Built(replica.layout.digest, marks, sampled_digest(records), kernels.marks)
    return msgspec.msgpack.encode(built)


def compare(described: Sequence[bytes]) -> list[Built]:
    """Every worker must have built the same model, and have the same data."""
    built = [msgspec.msgpack.decode(b, type=Built) for b in described]
    for rank, other in enumerate(built):
        if other.layout != built[0].layout:
            raise TaskError(
                f"the model that rank {rank} built has other tensors than rank 0's. A model "
                "must not depend on the process that builds it, or on randomness of its own."
            )
        if other.data != built[0].data:
            raise TaskError(
                f"rank {rank} has other data than rank 0. The task file was run in each worker "
                "(it holds something that cannot be pickled), so it must make the same data "
                "each time: seed what it draws."
            )
    return built


def notes(replica: Replica, data: Any, built: Sequence[Built]) -> list[str]:
    """What a person should know before the first step: what may make results differ."""
    found = nondeterminism.private_generators(replica.model, data)
    cut, because = how_to_cut(replica.optimizer)
    if cut == "nowhere" and len(built) > 1:
        found.append(f"the optimizer's work is not shared out: {because}")
    alike = [b.marks for b in built if b.kernels == built[0].kernels]
    if (note := nondeterminism.unlike(built[0].marks, alike)) is not None:
        found.append(note)
    return found


class Recheck:
    """An `Auditor`: of some steps one micro-batch is computed by two workers."""

    def __init__(
        self,
        replica: Replica,
        feed: WatchedFeed,
        loss: LossFn,
        train: TrainConfig,
        moment: Moment,
    ) -> None:
        self.replica, self.feed, self.loss, self.train = replica, feed, loss, train
        self.moment = moment

    def index(self, cut: Cut) -> int | None:
        every = self.train.audit_every
        if every is None or (cut.step + 1) % every:
            return None
        return (cut.step + 1) // every % len(cut.sizes)

    def digest(self, cut: Cut, index: int) -> int:
        replica = self.replica
        trainable = [replica.parameters[place.name] for place in replica.layout.trainable]
        leaf = self._compute(cut, index)
        self.moment("leaf")
        found = digest(trainable, leaf)
        self._clean_up()
        return found

    def first_not_finite(self, step: int, indices: Iterable[int]) -> tuple[int, str] | None:
        """Which of these micro-batches has a gradient that is not finite, and of what parameter:
        each is computed again."""
        cut, places = self.feed.cut(step), self.replica.layout.trainable
        for index in indices:
            self._compute(cut, index)
            gradients = [self.replica.parameters[place.name].grad for place in places]
            self._clean_up()
            for place, gradient in zip(places, gradients, strict=True):
                if gradient is not None and not gradient.to_dense().isfinite().all():
                    return index, place.name
        return None

    def _compute(self, cut: Cut, index: int) -> Leaf:
        replica, self._before = self.replica, self.feed.line.heartbeat.work
        self.feed.note(cut, index)
        replica.turn_to(cut.step)
        replica.buffers.begin(alone=len(cut.sizes) == 1)
        micro_batch = self.feed.unwatched(cut, index)
        with replica.guard:
            return compute(
                replica.model,
                micro_batch,
                self.loss,
                seed=self.train.seed,
                precision=self.train.precision,
            )

    def _clean_up(self) -> None:
        """What was computed was not for the step."""
        for parameter in self.replica.parameters.values():
            parameter.grad = None
        self.replica.buffers.show()
        before = self._before
        self.feed.line.heartbeat.begin(before.kind, before.step, before.index)
