# SPDX-License-Identifier: Apache-2.0
"""What all servers of a run have had to do: lately, and since it was last written down."""

from collections import deque

from manyhands.values.server_load import ServerLoad, ServerStatus, in_figures
from manyhands.values.view import View

LATELY_S = 10.0
WRITTEN_EVERY_S = 60.0


class ServerLoads:
    """Times are in seconds of any clock, the same for all calls."""

    def __init__(self, now: float) -> None:
        self._written = now
        self._ranks: dict[int, int] = {}
        """Worker → rank when it last served."""
        self._serving: set[int] = set()
        self._lately: dict[int, deque[tuple[float, ServerLoad]]] = {}
        self._untold: dict[int, ServerLoad] = {}

    def begin(self, view: View) -> None:
        ranks = {m.worker: m.rank for m in view.members if view.speeds[m.rank] == 0}
        self._ranks |= ranks
        self._serving = set(ranks)
        self._lately = {worker: told for worker, told in self._lately.items() if worker in ranks}

    def hear(self, worker: int, load: ServerLoad, now: float) -> None:
        self._ranks.setdefault(worker, worker)
        told = self._lately.setdefault(worker, deque())
        told.append((now, load))
        while told[0][0] < now - LATELY_S:
            told.popleft()
        self._untold[worker] = self._untold.get(worker, ServerLoad()) + load

    def lately(self) -> list[ServerStatus]:
        """Of those who serve now, by rank."""
        sums = {
            worker: sum((load for _, load in told), ServerLoad())
            for worker, told in self._lately.items()
            if worker in self._serving
        }
        return self._in_figures(sums)

    def due(self, now: float) -> bool:
        return now - self._written >= WRITTEN_EVERY_S

    def untold(self, now: float) -> list[ServerStatus]:
        """To be written down: since the last time, also of those who are gone. Who has done nothing
        is left out."""
        found = {worker: load for worker, load in self._untold.items() if load.applied}
        self._untold, self._written = {}, now
        return self._in_figures(found)

    def _in_figures(self, sums: dict[int, ServerLoad]) -> list[ServerStatus]:
        found = [in_figures(self._ranks[worker], worker, load) for worker, load in sums.items()]
        return sorted(found, key=lambda status: (status.rank, status.worker))
