# SPDX-License-Identifier: Apache-2.0
"""Audits: everybody computes the same micro-batch twice, and whoever differs is found out.

Between workers that agree with themselves the majority is right. Two opinions, one vote each: a
third worker is asked, in another view. Nobody gets the same result twice: it is the task's fault.
"""

from dataclasses import dataclass, replace

from manyhands.driver.supervise.membership import MOST_FAILED_STARTS
from manyhands.driver.supervise.worker_states import Situation
from manyhands.values import events
from manyhands.values.messages import Break, Reply, Testimony
from manyhands.values.verdict import Cause


@dataclass(frozen=True, slots=True)
class Judgement:
    """What an audit came to. Nobody guilty and no witness wanted: all is well, or it was once."""

    guilty: dict[int, str]
    """Worker → why."""
    text: str
    more: bool = False
    """Opinion stands against opinion: another worker must be asked."""
    hopeless: bool = False
    """Nobody gets the same result twice: it is the task, not a worker."""


THE_TASK = "the task keeps something from one micro-batch to the next outside of buffers"


def judge(testimonies: dict[int, tuple[int, ...]]) -> Judgement:
    """From what each worker computed, twice, for the same micro-batch."""
    unsteady = sorted(w for w, digests in testimonies.items() if len(set(digests)) > 1)
    steady = {w: digests[0] for w, digests in testimonies.items() if w not in unsteady}
    count = len(testimonies)
    if not steady or (len(unsteady) > 1 and len(unsteady) * 2 >= count):
        text = (
            "the same micro-batch gives other gradients each time, on every worker: the task is "
            "not a pure function of its records and seeds. Look for what it keeps from one "
            "micro-batch to the next outside of buffers (a list, a counter), a random generator "
            "of its own, the time, or an operation that is not deterministic."
        )
        return Judgement({}, text, hopeless=True)
    guilty = {w: "it does not get the same gradients twice" for w in unsteady}
    votes: dict[int, list[int]] = {}
    for worker, digest in steady.items():
        votes.setdefault(digest, []).append(worker)
    ranked = sorted(votes.values(), key=len, reverse=True)
    if len(ranked) == 1:
        alike = f"{len(steady)} workers computed the same bits"
        return Judgement(guilty, alike)
    if len(ranked[0]) == len(ranked[1]):
        text = (
            f"workers do not agree, and there is no majority: one computes wrongly, or {THE_TASK}"
        )
        return Judgement(guilty, text, more=True)
    right = len(ranked[0])
    for group in ranked[1:]:
        for worker in group:
            guilty[worker] = f"it computes other gradients than {right} other workers"
    return Judgement(guilty, f"{len(guilty)} of {count} workers compute wrongly, unless {THE_TASK}")


class Audit:
    """The testimonies of a view, and what becomes of its members when all have spoken."""

    def __init__(self, situation: Situation, tell: events.EventSink) -> None:
        self.now, self.tell = situation, tell
        self.testimonies: dict[int, Testimony] = {}

    def begin(self) -> None:
        """With another view: what was said in the one before does not count."""
        self.testimonies.clear()

    def hear(self, message: Testimony) -> Reply | Break | None:
        """Returns what all members are to be told, if they have been judged."""
        now, view = self.now, self.now.view
        assert view is not None
        self.testimonies[message.worker] = message
        if self.testimonies.keys() < {m.worker for m in view.members}:
            return None
        found = judge({w: tuple(t.digests) for w, t in self.testimonies.items()})
        self.testimonies.clear()
        what = f"micro-batch {message.micro_batch} of step {message.step}"
        now.audited = f"{what}: {found.text}"
        self.tell(
            events.Audited(
                step=message.step,
                micro_batch=message.micro_batch,
                text=found.text,
                guilty=sorted(found.guilty),
            )
        )
        if found.hopeless:
            now.unsteady = self._unsteady(message, found.text)
        for worker, why in found.guilty.items():
            now.workers[worker].wrong = f"an audit of {what} found that {why}"
        asked_in_vain = now.stop or now.failed_starts >= MOST_FAILED_STARTS
        found = replace(found, more=found.more and not asked_in_vain)
        now.witnesses = 1 if found.more else 0
        now.audit = message.micro_batch if found.more else None
        if found.guilty or found.more:
            guilty = "; ".join(f"worker {w}: {why}" for w, why in found.guilty.items())
            self.tell(events.Warned(text=f"{now.audited}. {guilty}"))
        if found.more:
            now.halted, now.running = "a third opinion is needed", False
            return Break(generation=view.generation)
        return None if found.guilty else Reply(round=f"judged-{view.generation}")

    def _unsteady(self, message: Testimony, text: str) -> Cause:
        return Cause(
            rank=self.now.rank_of(message.worker),
            worker=message.worker,
            pid=self.now.workers[message.worker].pid,
            host=self.now.workers[message.worker].host_name,
            step=message.step,
            what=text,
            noticed_by="an audit",
            micro_batch=message.micro_batch,
        )
