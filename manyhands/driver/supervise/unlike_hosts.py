# SPDX-License-Identifier: Apache-2.0
"""Hosts whose processors compute other bits than the run's first host.

With them the weights would depend on who computed what. Who is in first is the driver's own host,
if it takes workers, otherwise that of the first worker; once training has begun it stays so.
"""

from manyhands.driver.supervise.decisions import DropHost
from manyhands.driver.supervise.worker_states import ComputingHost, Situation, WorkerState
from manyhands.values import events
from manyhands.values.kernels import COMPILED, in_words, unlike


def first_host(now: Situation) -> ComputingHost | None:
    """Whose bits are the run's; None: not known yet."""
    if now.first_host is not None:
        return now.first_host
    living = [w for w in now.workers.values() if w.alive]
    first = min(living, key=lambda w: (w.at != "", w.number), default=None)
    if first is None or first.kernels is None:
        return None
    return ComputingHost(first.host_name, first.kernels)


def to_turn_away(now: Situation) -> DropHost | None:
    """A host that may not take part. The driver's own stays."""
    first = first_host(now)
    if first is None or now.unlike != "refuse":
        return None
    for worker, kinds in _unlike(now, first):
        if worker.at:
            otherwise = f"it computes otherwise than {first.name} ({', '.join(kinds)})"
            return DropHost(worker.at, otherwise)
    return None


def _unlike(now: Situation, first: ComputingHost) -> list[tuple[WorkerState, list[str]]]:
    """Workers that do not compute as the first host does, and of what they give other bits."""
    living = [(w, w.kernels) for w in now.workers.values() if w.alive]
    compared = [(w, unlike(first.kernels, k)) for w, k in living if k is not None]
    return [(worker, kinds) for worker, kinds in compared if kinds]


def _cure(kinds: list[str], *, compiles: bool) -> str:
    if kinds == [COMPILED]:
        return (
            " Give both the same C++ compiler (CXX says which), C library and settings of "
            "torch.compile, or leave train.compile out."
        )
    without = " Without train.compile," if compiles else ""
    return f"{without} --set train.portable=true has both compute alike, more slowly."


class UnlikeHosts:
    """Tells of each of them once, and what can be done."""

    def __init__(self, situation: Situation, tell: events.EventSink) -> None:
        self.now, self.tell = situation, tell
        self.told: set[str] = set()

    def look(self) -> None:
        first = first_host(self.now)
        if first is None:
            return
        for worker, kinds in _unlike(self.now, first):
            if worker.host_name not in self.told:
                self.told.add(worker.host_name)
                self.tell(events.Warned(text=self._words(worker, first, kinds)))

    def _words(self, worker: WorkerState, first: ComputingHost, kinds: list[str]) -> str:
        assert worker.kernels is not None
        name = worker.host_name
        text = (
            f"{name} computes otherwise than {first.name}, with {in_words(kinds)} "
            f"({name}: {worker.kernels.words}; {first.name}: {first.kernels.words}), so the "
            "weights depend on who computes what."
        )
        cure = _cure(kinds, compiles=bool(first.kernels.compiler))
        if self.now.unlike == "warn":
            return f"{text}{cure}"
        return (
            f"{text} {name} is turned away.{cure} --set train.unlike=warn lets it take part as it "
            "is."
        )
