# SPDX-License-Identifier: Apache-2.0
"""What the driver tells a worker as it starts it; all else it learns from the supervisor."""

from typing import Any

import msgspec

from manyhands.values.config import RunConfig
from manyhands.values.hidden_secrets import discreet
from manyhands.values.planned_faults import FaultPlan


class Keys(msgspec.Struct, frozen=True):
    """What a worker needs to reach its supervisor."""

    address: str
    supervisor_public: bytes
    worker_public: bytes
    worker_secret: bytes

    __repr__ = discreet


class TorchSettings(msgspec.Struct, frozen=True):
    """What a task file may have set for the whole process, and what changes results."""

    dtype: str = "float32"
    matmul: str = "highest"
    deterministic: bool = False


class Parcel(msgspec.Struct, frozen=True):
    """Where the task lies in the memfd that workers inherit. `source` is set when its file must be
    run instead."""

    pickle_bytes: int = 0
    table: tuple[int, int] = (0, 0)
    """Where the list of arrays is, as (offset, length); it may be long."""
    end: int = 0
    path: list[str] = []
    """The driver's sys.path"""
    source: str | None = None
    params: dict[str, Any] = {}
    """What its function is called with then."""
    settings: TorchSettings = TorchSettings()


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
    encrypt: bool = False
    """What they send each other."""
    steps: int
    stream: bool = False
    """Its data is a stream, which one process of each host may read for all workers there."""
    start_from: str | None = None
    """A safetensors file to take the first weights from."""
    log_every: int = 10
    replays: bool = False
    """It computes what another run did, and hears the scores that one heard."""
    debug: tuple[int, int] | None = None
    """Stop in a debugger at this micro-batch: (step, index)."""
    faults: FaultPlan = FaultPlan()

    __repr__ = discreet
