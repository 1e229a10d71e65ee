# SPDX-License-Identifier: Apache-2.0
"""From task and config to live objects: a replica, on which device, which Sync, over what."""

from collections.abc import Callable
from pathlib import Path

import torch

from manyhands.config import TrainConfig
from manyhands.errors import ConfigError, TaskError
from manyhands.task import Task
from manyhands.train.collective.contract import Collective, Patience, Sizes
from manyhands.train.collective.group import Group
from manyhands.train.collective.shared import Room, Shared
from manyhands.train.memory import Memory
from manyhands.train.seeds import seed_everything
from manyhands.train.state import Replica, build_model
from manyhands.train.sync.allreduce import AllReduce, Meet
from manyhands.train.sync.alone import Alone
from manyhands.train.sync.contract import Auditor, Moment, Sync
from manyhands.world import World, usable_cores


def choose_device(train: TrainConfig, rank: int) -> torch.device:
    if train.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError('train.device = "cuda", but torch sees no GPU here.')
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def replica(task: Task, train: TrainConfig, memory: Memory, device: torch.device) -> Replica:
    """Model, optimizer and schedule: the same in every worker, from the seed."""
    assert task.optimizer is not None
    seed_everything(train.seed, "model")
    model = build_model(task.model).to(device).train()
    optimizer = task.optimizer(model)
    schedule = task.schedule(optimizer) if task.schedule else None
    if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise TaskError(
            "Task: ReduceLROnPlateau wants a score at every step; use a schedule that does not."
        )
    return Replica(model, optimizer, schedule, memory, device)


def collective(
    kind: str,
    train: TrainConfig,
    memory: Memory,
    *,
    device: torch.device,
    rendezvous: Path,
    patience: Patience,
) -> Callable[[Sizes], Meet]:
    """`kind` as the plan chose it: first told what to make room for, then who meets."""

    def shared(sizes: Sizes) -> Meet:
        room = Room(memory, sizes)

        def meet(world: World, generation: int) -> Collective:
            # Spinning is for workers that have a core to themselves.
            spin = world.num_ranks * train.threads <= usable_cores()
            return Shared(world, room, generation, spin=spin, patience=patience)

        return meet

    def group(sizes: Sizes) -> Meet:
        def meet(world: World, generation: int) -> Collective:
            return Group(
                world,
                sizes,
                backend=kind,
                rendezvous=rendezvous.with_name(f"{rendezvous.name}-{generation}"),
                device=device,
                patience=patience,
            )

        return meet

    return shared if kind == "shared" else group


def strategy(
    train: TrainConfig,
    replica: Replica,
    memory: Memory,
    collective: Callable[[Sizes], Meet],
    *,
    heard: Callable[[], int],
    moment: Moment,
    auditor: Auditor,
) -> Sync:
    if train.sync == "alone":
        return Alone(replica, train, heard=heard)
    return AllReduce(
        replica, memory, collective, train, heard=heard, moment=moment, auditor=auditor
    )
