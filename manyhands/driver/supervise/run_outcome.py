# SPDX-License-Identifier: Apache-2.0
"""What supervising came to: a loss that was survived, and the end of a run that was done."""

from dataclasses import dataclass

from manyhands.values.messages import Left
from manyhands.values.verdict import Cause


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


@dataclass(frozen=True, slots=True)
class Done:
    leader: Left
    peak_memory_bytes: int
