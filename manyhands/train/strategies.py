# SPDX-License-Identifier: Apache-2.0
"""From config to live objects: which Sync, over which Collective, on which device."""

from collections.abc import Callable
from pathlib import Path

import torch

from manyhands.config import TrainConfig
from manyhands.errors import ConfigError
from manyhands.train.collective.contract import Collective, Sizes
from manyhands.train.collective.group import Group
from manyhands.train.collective.shared import Shared
from manyhands.train.memory import Memory
from manyhands.train.state import Replica
from manyhands.train.sync.allreduce import AllReduce
from manyhands.train.sync.alone import Alone
from manyhands.train.sync.contract import Sync
from manyhands.world import World, usable_cores

MakeCollective = Callable[[Sizes], Collective]


def choose_device(train: TrainConfig, rank: int) -> torch.device:
    if train.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError('train.device = "cuda", but torch sees no GPU here.')
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def collective(
    kind: str,
    train: TrainConfig,
    world: World,
    memory: Memory,
    *,
    device: torch.device,
    rendezvous: Path,
    broken: Callable[[], bool],
) -> MakeCollective:
    """`kind` as the plan chose it; made later, when the strategy knows what it needs room for."""

    def make(sizes: Sizes) -> Collective:
        if kind == "shared":
            # Spinning is for workers that have a core to themselves.
            spin = world.num_ranks * train.threads <= usable_cores()
            return Shared(world, memory, sizes, spin=spin, broken=broken)
        return Group(world, sizes, backend=kind, rendezvous=rendezvous, device=device)

    return make


def strategy(
    train: TrainConfig,
    replica: Replica,
    world: World,
    memory: Memory,
    make: MakeCollective,
    *,
    speeds: tuple[float, ...],
    heard: Callable[[], int],
) -> Sync:
    if train.sync == "alone":
        return Alone(replica, train, heard=heard)
    return AllReduce(replica, world, memory, make, train, speeds=speeds, heard=heard)
