# SPDX-License-Identifier: Apache-2.0
"""Micro-batches by step and index, and held-out batches by index: pure in (seed, step, index).

Fetching runs in the caller's thread. Where it may draw random numbers (a Dataset that augments),
`seeder` is called first, with a key of its own, so that what is drawn depends on nothing else.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from manyhands.accounting.deal_micro_batches import (
    Batch,
    Cut,
    MicroBatch,
    cut,
    ends_epoch,
    epochs_done,
    steps_per_epoch,
)
from manyhands.accounting.phases import Phases
from manyhands.data.columns.array_types import Positions
from manyhands.data.ordering.epoch_order import Order, RecordVisit
from manyhands.data.reading.records import Records
from manyhands.data.reading.sampled_records import SampledRecords
from manyhands.data.reading.stream_records import StreamRecords

Seeder = Callable[..., None]

WINDOW = 65536
"""Positions whose records are looked up at once: one by one, numpy's calls would cost more."""


class MicroBatchFeed:
    """The training records of a run as micro-batches."""

    def __init__(
        self,
        records: Records,
        *,
        seed: int,
        batch: int,
        micro_batch: int,
        seeder: Seeder,
        phases: Phases | None = None,
    ) -> None:
        self.records, self.seed, self.seeder = records, seed, seeder
        self.batch, self.micro_batch, self.phases = batch, micro_batch, phases
        self.keep = 2 * batch
        """Records of a stream that are kept after they were passed."""
        self._order: tuple[int, Order] | None = None
        self._window: tuple[int, int] = (-1, -1)
        self._ids: Positions = np.empty(0, dtype=np.int64)

    def cut(self, step: int) -> Cut:
        return cut(
            step,
            records=len(self.records),
            batch=self.batch,
            micro_batch=self.micro_batch,
            phases=self.phases,
        )

    def ends_epoch(self, step: int) -> bool:
        """Whether all of an epoch is done after step `step`."""
        return ends_epoch(step, records=len(self.records), batch=self.batch, phases=self.phases)

    def epochs_done(self, step: int) -> float:
        """By the steps before `step`."""
        return epochs_done(step, records=len(self.records), batch=self.batch, phases=self.phases)

    @property
    def batches_per_epoch(self) -> int:
        return steps_per_epoch(len(self.records), self.batch)

    def micro_batches(self, step: Cut, indices: Iterable[int]) -> Iterator[MicroBatch]:
        """These micro-batches of a step, fetched one at a time as they are asked for."""
        for index in indices:
            yield self.as_micro_batch(step, index, self.fetch(step, index))

    def fetch(self, step: Cut, index: int) -> Batch:
        """What micro-batch `index` of a step holds: pure in (seed, step, index), whoever asks."""
        ids = self._records_at(step.epoch, step.positions(index))
        visit = RecordVisit(self.seed, step.epoch)
        if isinstance(self.records, StreamRecords):  # which is seeded by record
            self.records.read(ids, visit, self.seeder, keep=self.keep)
        if self.records.draws_randomness:
            self.seeder(self.seed, step.fetched, index, "data")
        return self.records.batch(ids, visit)

    def as_micro_batch(self, step: Cut, index: int, batch: Batch, read: int = 0) -> MicroBatch:
        """... whoever has fetched it. `read`: of a stream, its digest."""
        start, size = step.positions(index).start, step.sizes[index]
        return MicroBatch(step.step, index, size, step.share(index), start, batch, read)

    # ---- batches by their number, which are the steps unless several optimizers share one

    def batch_number(self, step: Cut) -> int:
        return self.phases.batch_of(step.step) if self.phases else step.step

    def cut_of_batch(self, number: int) -> Cut:
        """As the first step sees it that reads it."""
        return self.cut(self.phases.steps_before(number) if self.phases else number)

    def batch_before(self, number: int) -> int:
        """The one before it in its epoch; the first has none, and is given itself."""
        if number == 0 or self.cut_of_batch(number - 1).epoch != self.cut_of_batch(number).epoch:
            return number
        return number - 1

    # ---- of a stream

    @property
    def stream(self) -> StreamRecords | None:
        return self.records if isinstance(self.records, StreamRecords) else None

    def state_before_batch(self, number: int) -> list[Any] | None:
        """What a stream says of itself, for reading a batch, and the one before it, which is then
        compared with what it was; None: nothing, or it is no stream."""
        if self.stream is None:
            return None
        cut = self.cut_of_batch(self.batch_before(number))
        return self.stream.state(cut.epoch, cut.start)

    def offer_stream_states(self, saved: Sequence[Any]) -> None:
        if self.stream is not None:
            self.stream.offer(saved)

    def goes_on_with(self, step: Cut, index: int) -> bool:
        """Whether it is read here, and about where this micro-batch is."""
        if self.stream is None:
            return True
        ids = self._records_at(step.epoch, step.positions(index))
        return self.stream.near(ids, RecordVisit(self.seed, step.epoch), 2 * self.batch)

    def watch_stream(self, progress: Callable[[], object], every: int) -> None:
        """To be called after so many records."""
        if self.stream is not None:
            self.stream.progress, self.stream.sign_every = progress, every

    def ids(self, step: Cut, index: int) -> Sequence[int]:
        """Which records micro-batch `index` of a step holds, in the user's numbering."""
        return self.records.names(self._records_at(step.epoch, step.positions(index)))

    def drawn(self, epoch: int) -> str | None:
        """A digest of what the user's own sampler gave for an epoch, where there is one."""
        if not isinstance(self.records, SampledRecords):
            return None
        return self.records.sampling.digest(self.seed, epoch)

    def _records_at(self, epoch: int, positions: range) -> Positions:
        """The epoch's order at these positions, from a window that is computed now and then."""
        if isinstance(self.records, StreamRecords):  # whose windows may be small
            return self._order_of(epoch)[positions]
        size = len(self.records)
        parts: list[Positions] = []
        start = positions.start
        while start < positions.stop:
            first = start - start % WINDOW
            if self._window != (epoch, first):
                self._window = (epoch, first)
                self._ids = self._order_of(epoch)[range(first, min(first + WINDOW, size))]
            stop = min(positions.stop, first + WINDOW)
            parts.append(self._ids[start - first : stop - first])
            start = stop
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _order_of(self, epoch: int) -> Order:
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, self.records.order(self.seed, epoch))
        return self._order[1]


def held_out_batches(
    records: Records, *, batch: int, indices: Iterable[int], seed: int, seeder: Seeder
) -> Iterator[tuple[int, int, Any]]:
    """(index, number of records, batch) of the held-out records, in their own order.

    Random numbers are seeded for fetching and again for whatever the model then draws.
    """
    for index in indices:
        ids = _held_out_at(records, batch, index)
        seeder(seed, 0, index, "held out")
        fetched = records.batch(ids, RecordVisit(seed, training=False))
        seeder(seed, 0, index, "score")
        yield index, len(ids), fetched


def held_out_ids(records: Records, batch: int, index: int) -> list[int]:
    """Which of the held-out records a batch of them holds, in the user's numbering."""
    return list(records.names(_held_out_at(records, batch, index)))


def _held_out_at(records: Records, batch: int, index: int) -> Positions:
    return np.arange(index * batch, min((index + 1) * batch, len(records)))


def on_device(batch: Any, device: torch.device) -> Any:
    """A batch's tensors on `device`, in the same nesting."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: on_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(on_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(on_device(value, device) for value in batch)
    return batch
