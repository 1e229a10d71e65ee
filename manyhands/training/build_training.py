# SPDX-License-Identifier: Apache-2.0
"""From task and config to live objects: a replica, on which device, which Sync, over what."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from manyhands.training.collective import mpi
from manyhands.training.collective.collective import Collective, Patience, Sizes
from manyhands.training.collective.handshake import PeerListener
from manyhands.training.collective.mpi import Mpi
from manyhands.training.collective.shared_memory import SharedMemory, SharedRoom
from manyhands.training.collective.sockets import Sockets
from manyhands.training.collective.torch_group import DeviceSlots, TorchGroup
from manyhands.training.collective.two_level import TwoLevel
from manyhands.training.compute.checkpointed_modules import checkpoint_modules
from manyhands.training.compute.compiled_forward import compile_forward
from manyhands.training.compute.seeds import seed_everything
from manyhands.training.state.build_optimizer import build_optimizer, build_schedules
from manyhands.training.state.layout import Lanes
from manyhands.training.state.memory import Memory
from manyhands.training.state.replica import Replica, build_model
from manyhands.training.state.weight_average import AverageKind, equal, moving
from manyhands.training.sync.allreduce.allreduce import AllReduce, MeetMembers
from manyhands.training.sync.alone import Alone
from manyhands.training.sync.cached_gradients import BetweenPasses, CachedGradients
from manyhands.training.sync.leaf_gradients import LeafGradients, PlainGradients
from manyhands.training.sync.sync import Auditor, Moment, Place, Sync
from manyhands.values.config import TrainConfig
from manyhands.values.errors import ConfigError
from manyhands.values.machine import usable_cores
from manyhands.values.task import Task


def choose_device(train: TrainConfig, rank: int) -> torch.device:
    if train.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError('train.device = "cuda", but torch sees no GPU here.')
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def replica(
    task: Task,
    train: TrainConfig,
    memory: Memory,
    device: torch.device,
    *,
    protect: bool,
    epoch_of: Callable[[int], int],
) -> Replica:
    """Model, optimizer and schedule: the same in every worker, from the seed. `protect`: this
    process is the worker's own, and may be ended when its model writes weights. `epoch_of` a step.
    """
    seed_everything(train.seed, "model")
    notes: list[str] = []
    built = build_model(task.model, (lambda text: None) if train.compile else notes.append)
    model = built.to(device).train()
    if train.checkpointed:
        checkpoint_modules(model, train.checkpointed)
    if train.compile:
        compile_forward(model)
    optimizer = build_optimizer(task, model)
    return Replica(
        model,
        optimizer,
        build_schedules(task, optimizer, model, seed=train.seed),
        memory,
        device,
        protect=protect,
        seed=train.seed,
        averages=averages(train, epoch_of),
        scaled=train.precision == "fp16",
        notes=notes,
    )


def averages(train: TrainConfig, epoch_of: Callable[[int], int]) -> list[AverageKind]:
    """Those of the weights that are kept beside them."""
    wanted = [moving(train.ema)] if train.ema is not None else []
    return wanted + ([equal(train.swa, epoch_of)] if train.swa is not None else [])


@dataclass(frozen=True, slots=True)
class PeerAccess:
    """How this worker is reached by those of other hosts, and how they know each other."""

    listener: PeerListener
    secret: bytes = field(repr=False)
    encrypt: bool
    rendezvous: Path
    measured: Callable[[list[tuple[int, float, float]]], None]
    """Told what was measured between this host and the others, when that was wanted."""


def collective(
    kind: str,
    train: TrainConfig,
    memory: Memory,
    *,
    device: torch.device,
    reach: PeerAccess,
    patience: Patience,
) -> Callable[[Sizes], MeetMembers]:
    """`kind` as the plan chose it: first told what to make room for, then who meets."""

    def prepare(sizes: Sizes) -> MeetMembers:
        room = SharedRoom(memory, sizes)
        slots = None if device.type == "cpu" else DeviceSlots(sizes, device)

        def meet(place: Place) -> TwoLevel:
            world = place.world
            # Spinning is for workers that have a core to themselves.
            spin = world.local_ranks * train.threads <= usable_cores()
            local = SharedMemory(world, room, place.generation, spin=spin, patience=patience)
            between = partial(_between, kind, place, slots or local.slots, device, reach)
            return TwoLevel(world, local, between, patience=patience, slots=slots)

        return meet

    return prepare


def _between(
    kind: str,
    place: Place,
    slots: Sequence[Lanes],
    device: torch.device,
    reach: PeerAccess,
    patience: Patience,
) -> Collective:
    """What hosts speak over."""
    hosts, generation = place.world.among_hosts(), place.generation
    match kind:
        case "gloo" | "nccl":
            path = reach.rendezvous.with_name(f"{reach.rendezvous.name}-{generation}")
            return TorchGroup(
                hosts,
                slots,
                backend=kind,
                rendezvous=path,
                address=reach.listener.address.rpartition(":")[0].strip("[]"),
                device=device,
                patience=patience,
            )
        case "mpi":
            return Mpi(hosts, slots, patience=patience, generation=generation)
        case _:
            links = Sockets(
                hosts,
                slots,
                listener=reach.listener,
                addresses=place.addresses,
                generation=generation,
                secret=place.secret or reach.secret,
                patience=patience,
                encrypt=reach.encrypt,
            )
            try:
                if place.measure:  # here it is the first thing that happens between hosts
                    reach.measured(links.measure())
            except BaseException:
                links.close()
                raise
            return links


def leave(kind: str) -> None:
    """Before a worker ends that has done all its work."""
    if kind == "mpi":
        mpi.finish()


def leaves(task: Task, replica: Replica, train: TrainConfig, watch: BetweenPasses) -> LeafGradients:
    """How a task's micro-batches become gradients."""
    if task.batch_loss is not None and train.precision == "fp16":
        raise ConfigError(
            'train.precision = "fp16" with batch_loss: the gradient by the embeddings is passed on '
            'as it is, and would not be scaled. Use "bf16" or "fp32".'
        )
    if task.batch_loss is not None:
        return CachedGradients(replica, train, watch)
    return PlainGradients(replica, train)


def strategy(
    task: Task,
    train: TrainConfig,
    replica: Replica,
    memory: Memory,
    collective: Callable[[Sizes], MeetMembers],
    leaves: LeafGradients,
    *,
    heard: Callable[[], int],
    moment: Moment,
    auditor: Auditor,
) -> Sync:
    if train.sync == "alone":
        return Alone(replica, train, leaves, heard=heard, after_step=task.after_step)
    return AllReduce(
        replica,
        memory,
        collective,
        train,
        leaves,
        heard=heard,
        moment=moment,
        auditor=auditor,
        after_step=task.after_step,
    )
