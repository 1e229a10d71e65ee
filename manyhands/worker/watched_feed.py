# SPDX-License-Identifier: Apache-2.0
"""Micro-batches, watched: the heartbeat tells which one is in work, and planned faults strike."""

import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from manyhands.accounting.deal_micro_batches import Cut, MicroBatch
from manyhands.data.reading.micro_batch_feed import MicroBatchFeed, on_device
from manyhands.launch.wire.control_channel import WorkerChannel
from manyhands.values.messages import Drew
from manyhands.worker.readers.read_ahead import ReadAhead


class WatchedFeed:
    """A feed that notes which micro-batch is in work, and lets planned faults strike.

    `drag(step, seconds)` is called after each micro-batch, with the time that it took. `twice`:
    micro-batches of a step are gone through once more (`again`), and only then are done.
    """

    def __init__(
        self,
        feed: MicroBatchFeed,
        line: WorkerChannel,
        device: torch.device,
        moment: Callable[[str], None],
        drag: Callable[[int, float], None],
        ahead: ReadAhead,
        *,
        twice: bool = False,
    ) -> None:
        self.feed, self.line, self.device, self.ahead = feed, line, device, ahead
        self.moment, self.drag, self.twice = moment, drag, twice
        self._took: dict[int, float] = {}
        """Seconds, by micro-batch of the step: the first time."""
        self._told = -1
        """The epoch of whose draw it was told last."""

    def cut(self, step: int) -> Cut:
        return self.feed.cut(step)

    def micro_batches(self, step: Cut, indices: Iterable[int]) -> Iterator[MicroBatch]:
        heartbeat = self.line.heartbeat
        heartbeat.step = step.step
        self.moment("begin")
        self._tell_of_draw(step)
        mine = list(indices)
        for k, index in enumerate(mine):
            self.line.stop_if_broken()
            started = time.perf_counter()
            self.note(step, index)  # before fetching: that can fail too
            self.moment("compute")
            self.ahead.plan(step, mine[k:])
            micro_batch = self.unwatched(step, index)
            started += self.ahead.waited_s  # which does not make this worker a slow one
            yield micro_batch
            self.drag(step.step, time.perf_counter() - started)
            self._took[index] = time.perf_counter() - started
            if not self.twice:
                heartbeat.did(self._took[index], micro_batch.records)
        heartbeat.begin("batch_loss" if self.twice else "update", step.step)

    def _tell_of_draw(self, step: Cut) -> None:
        """Before anything of an epoch is read that the user's own sampler draws."""
        if step.epoch != self._told:
            self._told = step.epoch
            if (digest := self.feed.drawn(step.epoch)) is not None:
                worker = self.line.heartbeat.worker
                self.line.send(Drew(worker=worker, step=step.step, digest=digest))

    def batch_loss(self, step: Cut) -> None:
        """The embeddings of the whole batch are here."""
        self.line.heartbeat.begin("batch_loss", step.step)
        self.moment("batch_loss")

    def again(self, step: Cut, micro_batches: Sequence[MicroBatch]) -> Iterator[MicroBatch]:
        """The same ones once more, in the same order."""
        for micro_batch in micro_batches:
            self.line.stop_if_broken()
            started = time.perf_counter()
            self.note(step, micro_batch.index, again=True)
            self.moment("again")
            yield micro_batch
            self.drag(step.step, time.perf_counter() - started)
            took = self._took[micro_batch.index] + time.perf_counter() - started
            self.line.heartbeat.did(took, micro_batch.records)
        self.line.heartbeat.begin("update", step.step)

    def note(self, step: Cut, index: int, *, again: bool = False) -> None:
        """This micro-batch is in hand."""
        self.line.heartbeat.begin("compute", step.step, index, step.sizes[index], again=again)

    def unwatched(self, step: Cut, index: int) -> MicroBatch:
        """One micro-batch, where the model is."""
        micro_batch = self.ahead.micro_batch(step, index)
        if self.device.type == "cpu":
            return micro_batch
        moved = on_device(micro_batch.batch, self.device)
        return dataclasses.replace(micro_batch, batch=moved)

    def batch_again(self, step: int, index: int) -> Any:
        """What a micro-batch held, fetched anew; None: a stream has gone too far."""
        cut, stream = self.feed.cut(step), self.ahead.stream
        if stream is None or self.feed.goes_on_with(cut, index):
            return self.feed.fetch(cut, index)
        return stream.look_back(cut, index)

    def ids(self, step: int, index: int) -> list[int]:
        """Which records a micro-batch holds, whoever computes it: they follow from the step."""
        return list(self.feed.ids(self.feed.cut(step), index))

    def epochs_done(self, step: int) -> float:
        return self.feed.epochs_done(step)

    def stream_state(self, step: int) -> list[Any] | None:
        """Where a stream is, for a checkpoint of the steps before `step`."""
        return None if self.ahead.stream is None else self.ahead.stream.state(step)

    def resume_stream(self, saved: Any) -> None:
        if self.ahead.stream is not None:
            self.ahead.stream.resume(saved)
