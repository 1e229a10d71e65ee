# SPDX-License-Identifier: Apache-2.0
"""Where a worker's micro-batches come from: its readers, or itself. The bits are the same."""

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from manyhands.accounting.deal_micro_batches import Cut, MicroBatch
from manyhands.data.reading.micro_batch_feed import MicroBatchFeed
from manyhands.data.reading.read_ahead_plan import (
    SLOTS,
    FetchCosts,
    FetchJob,
    ReaderChoice,
    choose_readers,
    jobs_to_come,
)
from manyhands.data.reading.same_batches import same_batches
from manyhands.launch.engines.nursery import Nursery
from manyhands.launch.wire.control_channel import WorkerChannel
from manyhands.values.errors import TaskError
from manyhands.values.messages import Notice
from manyhands.values.printable_text import printable
from manyhands.values.worker_orders import Orders
from manyhands.values.world import World
from manyhands.worker.readers.one_stream import OneStream
from manyhands.worker.readers.reading_crew import MISSING, ReadingCrew

COMPARE_EVERY = 64
"""Batches of a reader."""

Dealt = Callable[[Cut], Sequence[int]]


class ReadAhead:
    """A feed whose micro-batches may have been fetched before they are asked for.

    `nursery` is None where there can be no readers (a worker that is a thread). A sampler of the
    user's own is asked by the worker alone, whose answer is compared with the others'.
    """

    def __init__(
        self, feed: MicroBatchFeed, orders: Orders, line: WorkerChannel, nursery: Nursery | None
    ) -> None:
        self.feed, self.orders, self.line, self.nursery = feed, orders, line, nursery
        self.stream: OneStream | None = None
        """Where the data is one."""
        self.dealt: Dealt | None = None
        """Which micro-batches of a step are this worker's, as work is dealt now."""
        self.workers_here = 1
        self.costs: FetchCosts | None = FetchCosts()
        """Until it is decided whether readers are to be had that nobody has asked for."""
        self._idle_since = time.perf_counter()
        self.crew: ReadingCrew | None = None
        self._given: dict[int, int] = {}
        """By reader: how many batches were taken."""
        count = orders.config.data.readers
        samples = feed.drawn(0) is not None
        if samples or not feed.records.draws_randomness:  # rows of columns are there already
            self.costs = None
        if isinstance(count, int):
            self.costs = None
            if count and samples:
                self._tell(
                    "data.readers has no effect with a sampler of one's own: each of them would "
                    "ask it, and might get other records than the workers agreed on"
                )
            elif count and nursery is None:
                self._tell(
                    "data.readers has no effect here: this worker is a thread, not a process"
                )
            elif count:
                self._begin(ReaderChoice(count, "as asked"))

    def plan(self, step: Cut, left: Sequence[int]) -> None:
        """These micro-batches of a step are needed next; the first of them at once."""
        if self.crew is None:
            return
        jobs = jobs_to_come(
            step.step, left, self._later, steps=self.orders.steps, most=self.crew.room + 1
        )
        self.crew.want(jobs)

    def micro_batch(self, step: Cut, index: int) -> MicroBatch:
        if self.stream is not None:
            batch, read = self.stream.fetch(step, index)
            return self.feed.as_micro_batch(step, index, batch, read)
        batch = MISSING
        if self.crew is not None:
            batch = self.crew.take(FetchJob(step.step, index))
            if batch is not MISSING:
                batch = self._compared(self.crew, batch, step, index)
        if batch is MISSING:
            batch = self._fetched_here(step, index)
        return self.feed.as_micro_batch(step, index, batch)

    def _compared(self, crew: ReadingCrew, batch: Any, step: Cut, index: int) -> Any:
        """The first batch of each reader, and some later ones, are fetched here too: a data set may
        depend on what only one of the two processes has (a global variable that the model sets).
        """
        count = self._given.get(crew.gave, 0)
        self._given[crew.gave] = count + 1
        if count % COMPARE_EVERY:
            return batch
        own = self.feed.fetch(step, index)
        if same_batches(batch, own):
            return own
        if count:
            raise TaskError(
                f"micro-batch {index} of step {step.step} is another one when a reader fetches it "
                "than when its worker does, so the data set depends on something that only one of "
                "these processes has: a global variable, or a setting of torch's that was made "
                "after it was loaded. Set data.readers = 0, or make it when the task is loaded."
            )
        crew.dismiss(
            "a reader fetched other values than the worker does: the data set depends on something "
            "that is set while the model is built or computes"
        )
        return own

    def enter(self, world: World, generation: int) -> None:
        """A place in a view."""
        self.workers_here = world.local_ranks
        if self.stream is not None:
            self.stream.enter(world, generation)

    @property
    def waited_s(self) -> float:
        """For whoever reads a stream for all, when a micro-batch was fetched last."""
        shared = None if self.stream is None else self.stream.shared
        return 0.0 if shared is None else shared.waited_s

    def close(self) -> None:
        if self.crew is not None:
            self.crew.close()
        if self.nursery is not None:
            self.nursery.close()

    def _later(self, step: int) -> Sequence[int]:
        return () if self.dealt is None else self.dealt(self.feed.cut(step))

    def _fetched_here(self, step: Cut, index: int) -> Any:
        started, cpu = time.perf_counter(), time.thread_time()
        batch = self.feed.fetch(step, index)
        if self.crew is not None:
            self.crew.learn(batch, time.perf_counter() - started)
        if self.costs is not None and self.nursery is not None:
            ended = time.perf_counter()
            self.costs = FetchCosts(
                self.costs.count + 1,
                self.costs.fetch_s + ended - started,
                self.costs.fetch_cpu_s + time.thread_time() - cpu,
                self.costs.rest_s + started - self._idle_since,
            )
            self._idle_since = ended
            self._decide(self.costs)
        return batch

    def _decide(self, costs: FetchCosts) -> None:
        chosen = choose_readers(
            costs,
            cores=len(os.sched_getaffinity(0)),
            workers=self.workers_here,
            threads=self.orders.config.train.threads,
        )
        if chosen is None:
            return
        if chosen.readers:
            self._begin(chosen)
        self.costs = None

    def _begin(self, chosen: ReaderChoice) -> None:
        assert self.nursery is not None
        config = self.orders.config
        self.crew = ReadingCrew(
            self.nursery,
            chosen.readers,
            stuck_s=config.recovery.stuck_s,
            tell=self._tell,
            still_wanted=self.line.stop_if_broken,
        )
        if self.costs is not None and self.line.heartbeat.leads:  # what was asked for is known
            one = chosen.readers == 1
            readers = "1 reader now fetches" if one else f"{chosen.readers} readers now fetch"
            ahead = f"{readers} up to {chosen.readers * SLOTS} micro-batches ahead"
            self._tell(f"{chosen.because}: {ahead} (data.readers=0 to have none)")

    def _tell(self, text: str) -> None:
        self.line.send(Notice(worker=self.orders.worker, text=printable(text)))
