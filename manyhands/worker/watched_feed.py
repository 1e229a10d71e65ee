# SPDX-License-Identifier: Apache-2.0
"""What a worker has in work: noted while it computes, and told when something goes wrong."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator

import torch

from manyhands.accounting.micro_batches import Cut, MicroBatch, steps_per_epoch
from manyhands.data.reading.micro_batch_feed import MicroBatchFeed, on_device
from manyhands.launch.wire.channel import Line
from manyhands.launch.wire.heartbeat import Pulse
from manyhands.training.collective.handshake import Door
from manyhands.values.errors import LossNotFinite, ManyhandsError, RequestError
from manyhands.values.messages import Trouble
from manyhands.values.task import user_traceback
from manyhands.values.verdict import explain


class WatchedFeed:
    """A feed that notes which micro-batch is in work, and lets planned faults strike.

    `drag(step, seconds)` is called after each micro-batch, with the time that it took.
    """

    def __init__(
        self,
        feed: MicroBatchFeed,
        line: Line,
        device: torch.device,
        moment: Callable[[str], None],
        drag: Callable[[int, float], None],
    ) -> None:
        self.feed, self.line, self.device = feed, line, device
        self.moment, self.drag = moment, drag
        self.steps_per_epoch = steps_per_epoch(len(feed.records), feed.batch)

    def cut(self, step: int) -> Cut:
        return self.feed.cut(step)

    def micro_batches(self, step: Cut, indices: Iterable[int]) -> Iterator[MicroBatch]:
        pulse = self.line.pulse
        pulse.step = step.step
        self.moment("begin")
        for index in indices:
            self.line.stop_if_broken()
            started = time.perf_counter()
            pulse.current = (step.step, index)  # before fetching: that can fail too
            self.moment("compute")
            micro_batch = self.unwatched(step, index)
            yield micro_batch
            self.drag(step.step, time.perf_counter() - started)
            pulse.did(time.perf_counter() - started, micro_batch.records)
        pulse.current = None

    def unwatched(self, step: Cut, index: int) -> MicroBatch:
        """One micro-batch, where the model is."""
        (micro_batch,) = self.feed.micro_batches(step, [index])
        if self.device.type == "cpu":
            return micro_batch
        moved = on_device(micro_batch.batch, self.device)
        return dataclasses.replace(micro_batch, batch=moved)

    def ids(self, step: int, index: int) -> list[int]:
        """Which records a micro-batch holds, whoever computes it: they follow from the step."""
        return list(self.feed.ids(self.feed.cut(step), index))

    def epochs_done(self, step: int) -> float:
        return step / self.steps_per_epoch


class WatchedDoor:
    """Tells, once in a while, of connections that were refused because they were none of ours."""

    def __init__(self, door: Door, say: Callable[[str], None], every_s: float = 10.0) -> None:
        self.door, self.say, self.every_s = door, say, every_s
        self.told, self.told_at = 0, -math.inf

    def tell(self) -> None:
        count, now = self.door.strangers - self.told, time.monotonic()
        if count and now - self.told_at >= self.every_s:
            self.told, self.told_at = self.door.strangers, now
            were = "connection was" if count == 1 else "connections were"
            why = self.door.last_stranger
            self.say(f"{count} {were} refused at {self.door.address}, the last because {why}")


def trouble_of(
    error: BaseException, pulse: Pulse, rank: int, ids: Callable[[int, int], list[int]]
) -> Trouble:
    """What went wrong here, for the supervisor. `ids` are those of a `WatchedFeed`."""
    index, records, symptom = None, list[int](), False
    if isinstance(error, LossNotFinite):
        owner, step, index, loss, _ = error.args
        records = ids(step, index)
        error = LossNotFinite(owner, step, index, loss, records)
        symptom = owner != rank  # every worker sees it; the one that computed it reports it
    elif pulse.current is not None:
        step, index = pulse.current
        records = ids(step, index)
    ours = isinstance(error, ManyhandsError)
    return Trouble(
        worker=pulse.worker,
        step=pulse.step,
        kind=type(error).__name__,
        text=_clean(str(error) if ours else explain(error)),
        trace="" if ours else _clean(user_traceback(error)),
        request=isinstance(error, RequestError),
        ours=ours,
        symptom=symptom,
        micro_batch=index,
        records=records,
    )


def _clean(text: str) -> str:
    """Text that can be sent: undecodable file names leave lone surrogates in messages."""
    return text.encode("utf-8", "backslashreplace").decode()
