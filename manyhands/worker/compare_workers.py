# SPDX-License-Identifier: Apache-2.0
"""Workers are compared with each other: what they have built, and what they compute."""

from collections.abc import Iterable, Sequence

import msgspec
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

from manyhands.accounting.deal_micro_batches import Cut, MicroBatch
from manyhands.data.reading.records import Records, sampled_digest
from manyhands.training.compute import nondeterminism
from manyhands.training.compute.micro_batch_gradient import Leaf, LossFn, digest
from manyhands.training.state.layout import share_out
from manyhands.training.state.module_paths import modules_of
from manyhands.training.state.optimizer_kinds import how_to_cut
from manyhands.training.state.replica import Replica
from manyhands.training.sync.leaf_gradients import LeafGradients
from manyhands.training.sync.sync import Moment
from manyhands.values.config import TrainConfig
from manyhands.values.errors import EmbeddingsDiffer, TaskError
from manyhands.values.kernels import Kernels
from manyhands.values.messages import Built
from manyhands.values.server_config import ServerConfig
from manyhands.values.task import Task
from manyhands.worker.watched_feed import WatchedFeed


def describe(replica: Replica, records: Records, kernels: Kernels) -> bytes:
    """For a worker that has just built these."""
    marks = nondeterminism.marks(replica.parameters)
    layout = replica.layout.digest + replica.tables.mark()
    built = Built(layout, marks, sampled_digest(records), kernels.marks)
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


def notes(
    replica: Replica,
    task: Task,
    train: TrainConfig,
    built: Sequence[Built],
    servers: ServerConfig | None = None,
) -> list[str]:
    """What a person should know before the first step: what may make results differ, and what
    looks at several records at once."""
    found = [*replica.notes, *nondeterminism.private_generators(replica.model, task.data)]
    found += _seen_together(replica, train)
    cut, because = how_to_cut(replica.optimizer)
    if cut == "nowhere" and len(built) > 1:
        found.append(f"the optimizer's work is not shared out: {because}")
    if servers is not None:
        shares = share_out(replica.layout, servers.count, cut=cut)
        if idle := sum(not spans for spans in shares):
            found.append(
                f"{idle} of the {servers.count} servers get nothing to update: the model's weights "
                "cannot be cut into so many near equal parts. What has nothing stands by"
            )
    alike = [b.marks for b in built if b.kernels == built[0].kernels]
    if (note := nondeterminism.unlike(built[0].marks, alike)) is not None:
        found.append(note)
    return found


SOME_IDS = 8
"""Of rows that are named."""

UNLIKE = 2
"""In place of a digest: what another worker computed is not what comes out here."""


def _seen_together(replica: Replica, train: TrainConfig) -> list[str]:
    """How many records a BatchNorm sees, where that is not the batch. One that goes by what it has
    seen before, as in eval, sees none. What a batch loss sees is in the plan."""
    norms = [m for _, m in modules_of(replica.model) if isinstance(m, _BatchNorm)]
    if train.micro_batches == 1 or not any(m.training or m.running_mean is None for m in norms):
        return []
    seen = f"BatchNorm sees {train.micro_batch_size} records (train.micro_batch)"
    if train.micro_batch is not None:
        return [seen]
    return [
        f"{seen}, not the batch's {train.batch}; --set train.micro_batch={train.batch} keeps that"
    ]


class Recheck:
    """An `Auditor`: of some steps one micro-batch is computed by two workers."""

    def __init__(
        self,
        replica: Replica,
        feed: WatchedFeed,
        loss: LossFn,
        leaves: LeafGradients,
        train: TrainConfig,
        moment: Moment,
    ) -> None:
        self.replica, self.feed, self.loss, self.train = replica, feed, loss, train
        self.leaves, self.moment = leaves, moment

    def index(self, cut: Cut) -> int | None:
        every = self.train.audit_every
        if every is None or (cut.step + 1) % every:
            return None
        return (cut.step + 1) // every % len(cut.sizes)

    def digest(self, cut: Cut, index: int) -> int:
        replica = self.replica
        trainable = [replica.parameters[place.name] for place in replica.layout.trainable]
        try:
            leaf = self._compute(cut, index)
        except EmbeddingsDiffer:  # from those that the other worker told of
            self._clean_up()
            return UNLIKE
        self.moment("leaf")
        rows = [t for g in replica.tables.take_gradients() for t in g.tensors()]
        found = digest(trainable, leaf, rows)
        self._clean_up()
        return found

    def testify(self, cut: Cut, index: int) -> int:
        """The same, outside a step, with nothing that others have computed."""
        self.leaves.forget()
        return self.digest(cut, index)

    def first_not_finite(self, step: int, indices: Iterable[int]) -> tuple[int, str] | None:
        """Which of these micro-batches has a gradient that is not finite, and of what parameter, or
        rows of a table: each is computed again."""
        cut, places = self.feed.cut(step), self.replica.layout.trainable
        for index in indices:
            self._compute(cut, index)
            gradients = [self.replica.parameters[place.name].grad for place in places]
            rows = self.replica.tables.take_gradients()
            self._clean_up()
            wrong = [
                f"'{place.name}'"
                for place, gradient in zip(places, gradients, strict=True)
                if gradient is not None and not gradient.to_dense().isfinite().all()
            ][:1]
            for table, gradient in zip(self.replica.tables, rows, strict=True):
                odd = ~gradient.rows.isfinite().all(dim=1)
                if odd.any():
                    wrong.append(_rows_of(table.name, gradient.ids[odd.numpy()].tolist()))
            if wrong:
                return index, " and of ".join(wrong)
        return None

    def _compute(self, cut: Cut, index: int) -> Leaf:
        self._before = self.feed.line.heartbeat.work
        self.replica.turn_to(cut.step)

        def fetch(index: int) -> MicroBatch:
            self.feed.note(cut, index)
            return self.feed.unwatched(cut, index)

        return self.leaves.compute_alone(cut, index, fetch, self.loss)

    def _clean_up(self) -> None:
        """What was computed was not for the step."""
        for parameter in self.replica.parameters.values():
            parameter.grad = None
        self.replica.buffers.show()
        before = self._before
        self.feed.line.heartbeat.begin(before.kind, before.step, before.index)


def _rows_of(table: str, ids: Sequence[int]) -> str:
    more = f" and {len(ids) - SOME_IDS} more" if len(ids) > SOME_IDS else ""
    some = ", ".join(str(n) for n in ids[:SOME_IDS])
    return f"table '{table}' in the row{'s' * (len(ids) > 1)} of id {some}{more}"
