# SPDX-License-Identifier: Apache-2.0
"""What went wrong in a worker, in words for the supervisor; and who was refused by it."""

import math
import time
from collections.abc import Callable

from manyhands.launch.wire.heartbeat import Heartbeat
from manyhands.training.collective.handshake import PeerListener
from manyhands.values.bounded_types import MANY
from manyhands.values.errors import GradientNotFinite, LossNotFinite, ManyhandsError, RequestError
from manyhands.values.messages import Trouble
from manyhands.values.printable_text import printable
from manyhands.values.user_frames import user_traceback
from manyhands.values.verdict import explain
from manyhands.values.work_in_hand import WorkInHand


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


MOST_TEXT, MOST_TRACE = 4000, 20000
"""Characters of an exception's text, and of where it came from, that are passed on."""


def trouble_of(
    error: BaseException,
    heartbeat: Heartbeat,
    rank: int,
    ids: Callable[[WorkInHand], list[int]],
    not_finite: Callable[[WorkInHand, list[int]], str],
) -> Trouble:
    """What went wrong here, for the supervisor. `ids` are those of the records in hand;
    `not_finite` tells which of them hold NaN or infinity themselves."""
    work, records, symptom = heartbeat.work, list[int](), False
    if isinstance(error, LossNotFinite):
        owner, step, index, loss, *_ = error.args
        known = index is not None
        work = WorkInHand("compute", step, index) if known else WorkInHand("batch_loss", step)
        records = ids(work) if known else []
        symptom = owner != rank  # every worker sees it; the one that computed it reports it
        because = not_finite(work, records) if known and not symptom else ""
        error = LossNotFinite(owner, step, index, loss, records, because)
    elif isinstance(error, GradientNotFinite):
        owner, step, index, name, _, apart = error.args
        known = index is not None
        work = WorkInHand("compute", step, index) if known else WorkInHand("update", step)
        records = ids(work) if known else []
        error = GradientNotFinite(owner, step, index, name, records, apart)
        symptom = owner not in (None, rank)
    elif work.has_records:
        records = ids(work)
    ours = isinstance(error, ManyhandsError)
    return Trouble(
        worker=heartbeat.worker,
        step=heartbeat.step,
        kind=type(error).__name__,
        text=_clean(str(error) if ours else explain(error), MOST_TEXT),
        trace="" if ours else _clean(user_traceback(error), MOST_TRACE),
        request=isinstance(error, RequestError),
        ours=ours,
        symptom=symptom,
        micro_batch=work.index if work.has_records else None,
        held_out=work.kind == "evaluate",
        records=records[:MANY],
    )


def _clean(text: str, most: int) -> str:
    """Text that can be sent: undecodable file names leave lone surrogates in messages, and some
    exceptions hold all the data that they did not like."""
    return printable(text, most)
