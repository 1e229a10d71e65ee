# SPDX-License-Identifier: Apache-2.0
"""Whom the supervisor tells, and in which words."""

from dataclasses import dataclass
from typing import Any, Protocol

from manyhands.values import events
from manyhands.values.messages import (
    Answer,
    Beat,
    Left,
    ReadFile,
    SavedFile,
    Settings,
    StoreFile,
    View,
)
from manyhands.values.verdict import Cause


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    rank: int
    worker: int
    pid: int
    host: str
    step: int
    samples_per_s: float
    micro_batches: int = 0
    """Of a full step, how many are dealt to it."""


@dataclass(frozen=True, slots=True)
class Link:
    """Between two hosts, as they measured it."""

    host: str
    other: str
    round_trip_s: float
    bytes_per_s: float
    """In both directions at once."""


@dataclass(frozen=True, slots=True)
class Incident:
    """A loss, and what became of it."""

    cause: Cause
    decided: str
    seconds: float
    """From noticing it to the view that went on."""
    step: int
    """Where training went on."""
    recomputed: int
    """Micro-batches that were computed and had to be computed again."""


class Audience(Protocol):
    """Whom the supervisor tells. The driver implements it; nothing here may block for long."""

    def event(self, event: events.AnyEvent) -> None: ...
    def beat(self, beat: Beat) -> None: ...
    def status(self, workers: list[WorkerStatus], links: list[Link], doing: str) -> None: ...

    def begun(
        self, view: View, step: int, groups: list[dict[str, Any]], schedule: list[str]
    ) -> None:
        """A view is in force from `step` on, with these hyper-parameters and kinds of schedule."""
        ...

    def changed(self, step: int, changes: Settings) -> None:
        """Settings in force from `step` on; durable on return."""
        ...

    def recovered(self, incident: Incident) -> None: ...

    def scored(self, step: int, scores: dict[str, float]) -> str | None:
        """Returns the reason to stop early, if there is one."""
        ...

    def written(self, step: int, attempt: int, files: list[SavedFile], blocked_s: float) -> None:
        """All workers of view `attempt` have written their files of a step."""
        ...

    def serve(self, message: StoreFile | ReadFile) -> Answer:
        """Files of the run, for a worker whose host does not see its folder."""
        ...

    def objection(self, changes: Settings) -> str | None:
        """Why these settings cannot be changed, if so."""
        ...


@dataclass(frozen=True, slots=True)
class Done:
    leader: Left
    peak_memory_bytes: int
