# SPDX-License-Identifier: Apache-2.0
"""What status.json says of workers, of their hosts, and of the network between these."""

from dataclasses import dataclass, field


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
    serves: bool = False
    """It computes nothing, and updates the weights."""


@dataclass(frozen=True, slots=True)
class HostStatus:
    name: str
    address: str
    slots: int
    since: float
    """When it joined, in seconds since 1970."""
    state: str
    """driver: this run's own host; ready: workers can be started there; getting ready; leaving"""
    token: str = ""
    """By which it came: its own, or the one that all have; the driver's host needs none."""
    ranks: list[int] = field(default_factory=list[int])


@dataclass(frozen=True, slots=True)
class Link:
    """Between two hosts, as they measured it."""

    host: str
    other: str
    round_trip_s: float
    bytes_per_s: float
    """In both directions at once."""
