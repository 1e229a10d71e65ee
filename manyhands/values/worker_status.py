# SPDX-License-Identifier: Apache-2.0
"""What status.json says of workers, and of the network between their hosts."""

from dataclasses import dataclass


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
