# SPDX-License-Identifier: Apache-2.0
"""What the driver tells a worker as it starts it; all else it learns from the supervisor."""

import msgspec

from manyhands.config import RunConfig
from manyhands.launch.shipping import Parcel
from manyhands.launch.wire import Keys
from manyhands.testing.faults import FaultPlan


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a worker needs to know before it can ask."""

    worker: int
    """Its number, for the life of the run."""
    order: int = 0
    """It is the n-th that this driver has started."""
    keys: Keys | None
    """How to reach the supervisor; filled in last."""
    run: str
    config: RunConfig
    collective: str
    parcel: Parcel
    task_fd: int
    state_fd: int
    address: str = "127.0.0.1"
    """Of this host, as the others reach it."""
    shares: bool = True
    """Its host sees the run's folder."""
    secret: bytes = b""
    """By which workers of different hosts know each other."""
    steps: int
    start_from: str | None = None
    """A safetensors file to take the first weights from."""
    log_every: int = 10
    debug: tuple[int, int] | None = None
    """Stop in a debugger at this micro-batch: (step, index)."""
    faults: FaultPlan = FaultPlan()
