# SPDX-License-Identifier: Apache-2.0
"""What went wrong in a worker, in words for the supervisor; and who was refused by it."""

import math
import time
from collections.abc import Callable

from manyhands.launch.wire.heartbeat import Heartbeat
from manyhands.training.collective.handshake import PeerListener
from manyhands.values.errors import GradientNotFinite, LossNotFinite, ManyhandsError, RequestError
from manyhands.values.messages import Trouble
from manyhands.values.task import user_traceback
from manyhands.values.verdict import explain


class WatchedListener:
    """Tells, once in a while, of connections that were refused because they were none of ours."""

    def __init__(
        self, listener: PeerListener, say: Callable[[str], None], every_s: float = 10.0
    ) -> None:
        self.listener, self.say, self.every_s = listener, say, every_s
        self.told, self.told_at = 0, -math.inf

    def tell(self) -> None:
        count, now = self.listener.strangers - self.told, time.monotonic()
        if count and now - self.told_at >= self.every_s:
            self.told, self.told_at = self.listener.strangers, now
            were = "connection was" if count == 1 else "connections were"
            why = self.listener.last_stranger
            self.say(f"{count} {were} refused at {self.listener.address}, the last because {why}")


def trouble_of(
    error: BaseException, heartbeat: Heartbeat, rank: int, ids: Callable[[int, int], list[int]]
) -> Trouble:
    """What went wrong here, for the supervisor. `ids` are those of a `WatchedFeed`."""
    index, records, symptom = None, list[int](), False
    if isinstance(error, LossNotFinite):
        owner, step, index, loss, _ = error.args
        records = ids(step, index)
        error = LossNotFinite(owner, step, index, loss, records)
        symptom = owner != rank  # every worker sees it; the one that computed it reports it
    elif isinstance(error, GradientNotFinite):
        owner, step, index, name, _ = error.args
        records = ids(step, index) if index is not None else []
        error = GradientNotFinite(owner, step, index, name, records)
        symptom = owner not in (None, rank)
    elif heartbeat.current is not None:
        step, index = heartbeat.current
        records = ids(step, index)
    ours = isinstance(error, ManyhandsError)
    return Trouble(
        worker=heartbeat.worker,
        step=heartbeat.step,
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
