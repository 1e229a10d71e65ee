# SPDX-License-Identifier: Apache-2.0
"""From task and config to live objects: a replica, on which device, which Sync, over what."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

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
from manyhands.training.memory.memory import Memory
from manyhands.training.state.build_optimizer import build_optimizer, build_schedules
from manyhands.training.state.layout import BLOCK, Lanes, most_shares
from manyhands.training.state.optimizer_kinds import how_to_cut
from manyhands.training.state.phased_optimizer import PhasedOptimizer
from manyhands.training.state.replica import Replica, build_model
from manyhands.training.state.rows.embedding import Embedding
from manyhands.training.state.weight_average import AverageKind, equal, moving
from manyhands.training.sync.allreduce.allreduce import AllReduce, MeetMembers
from manyhands.training.sync.alone import Alone
from manyhands.training.sync.cached_gradients import BetweenPasses, CachedGradients
from manyhands.training.sync.leaf_gradients import LeafGradients, PlainGradients
from manyhands.training.sync.load_meter import LoadMeter
from manyhands.training.sync.merge.board import Tally
from manyhands.training.sync.merge.history import Recorder
from manyhands.training.sync.merge.merge_server import MergeServer
from manyhands.training.sync.merge.worker_turns import StepFeed
from manyhands.training.sync.sync import Auditor, Moment, Place, Sync
from manyhands.values.config import TrainConfig
from manyhands.values.errors import ConfigError
from manyhands.values.machine import usable_cores
from manyhands.values.server_config import ServerConfig
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
    refuse_beside_tables(model, optimizer, train)
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


def refuse_beside_tables(model: Module, optimizer: Optimizer, train: TrainConfig) -> None:
    """What does not go with rows that are kept by tables."""
    if not any(isinstance(module, Embedding) for module in model.modules()):
        return
    found = {
        "several optimizers": isinstance(optimizer, PhasedOptimizer),
        "train.ema, which would not average the rows": train.ema is not None,
        "train.swa, which would not average the rows": train.swa is not None,
        "train.compile": train.compile,
        'train.device = "cuda" (untried)': train.device == "cuda",
    }
    for what, there in found.items():
        if there:
            raise ConfigError(f"mh.Embedding does not go with {what}. Leave one of them out.")
    follows = any(module.follows for module in model.modules() if isinstance(module, Embedding))
    if follows and not isinstance(optimizer.param_groups[0].get("lr"), int | float | Tensor):
        raise ConfigError(
            "mh.Embedding without lr follows the rate of the task's optimizer, whose first group "
            "has none. Give it one: mh.Embedding(..., lr=0.05)."
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


def leaves(
    task: Task, replica: Replica, train: TrainConfig, watch: BetweenPasses, *, merges: bool = False
) -> LeafGradients:
    """How a task's micro-batches become gradients. `merges`: workers are at different steps."""
    if task.batch_loss is not None and train.precision == "fp16":
        raise ConfigError(
            'train.precision = "fp16" with batch_loss: the gradient by the embeddings is passed on '
            'as it is, and would not be scaled. Use "bf16" or "fp32".'
        )
    if task.batch_loss is not None:
        return CachedGradients(replica, train, watch)
    return PlainGradients(replica, train, takes_buffers=not merges)


def refuse_what_cannot_be_merged(mode: str, task: Task, replica: Replica) -> None:
    """What a task has that needs all workers to be at the same step."""
    buffers, optimizer = replica.buffers, replica.optimizer
    cut, because = how_to_cut(optimizer)
    found = {
        "Task(after_step=...), which is called after each step": task.after_step is not None,
        "Task(batch_loss=...)": task.batch_loss is not None,
        "several optimizers": isinstance(optimizer, PhasedOptimizer),
        f"an optimizer that is not cut ({because})": cut == "nowhere",
        "mh.Embedding": bool(replica.tables),
        "nn.Embedding(max_norm=...), which changes weights as it computes": bool(buffers.rows),
    }
    for what, there in found.items():
        if there:
            raise ConfigError(
                f'server.mode = "{mode}" does not go with {what}: workers are at different steps. '
                'Use server.mode = "sync" (or --sync allreduce).'
            )


def refuse_idle_servers(servers: ServerConfig, replica: Replica) -> None:
    """More of them than there is anything to share out."""
    cut, _ = how_to_cut(replica.optimizer)
    most = None if replica.tables else most_shares(replica.layout, cut=cut)
    if most is not None and servers.count > most:
        kind = f"blocks of {BLOCK:,} numbers" if cut == "blocks" else "whole tensors"
        raise ConfigError(
            f"server.count = {servers.count}: the weights are shared out in {kind}, of which this "
            f"model has {most}, so that some servers would have nothing to update. Set "
            f"server.count to {most} at the most."
        )


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
    feed: StepFeed,
    servers: ServerConfig | None = None,
    met: Callable[[int, int, Tally], None] = lambda generation, step, tally: None,
    load: LoadMeter | None = None,
    record: Recorder | None = None,
) -> Sync:
    """`feed`, `met`, `record`: for servers that merge (merge_server.py). `load`: what servers do is
    told to it."""
    if train.sync == "alone":
        return Alone(replica, train, leaves, heard=heard, after_step=task.after_step)
    if servers is not None:
        refuse_idle_servers(servers, replica)
    if servers is not None and servers.merges:
        refuse_what_cannot_be_merged(servers.mode, task, replica)
        return MergeServer(
            replica,
            memory,
            collective,
            train,
            leaves,
            feed,
            bound=servers.staleness,
            heard=heard,
            moment=moment,
            met=met,
            load=load,
            record=record or Recorder(),
        )
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
        load=load,
    )
