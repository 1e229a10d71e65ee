# SPDX-License-Identifier: Apache-2.0
"""Everything a worker trains with: model, optimizer, data and the strategy, each from the task and
nothing else."""

import pdb
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from manyhands.data.open_data import make_ready, share
from manyhands.data.reading.records import Records
from manyhands.data.reading.stream_records import SIGN_OF_LIFE
from manyhands.launch.engines.nursery import Nursery
from manyhands.launch.shipping import ship_task
from manyhands.launch.wire.control_channel import WorkerChannel
from manyhands.training import build_training
from manyhands.training.collective.collective import PRIVATE
from manyhands.training.collective.handshake import PeerListener
from manyhands.training.compute.micro_batch_gradient import LossFn
from manyhands.training.memory.memory import Memory, Room
from manyhands.training.state.replica import Replica
from manyhands.training.sync.load_meter import LoadMeter
from manyhands.training.sync.merge.board import Tally
from manyhands.training.sync.merge.history import Recorder
from manyhands.training.sync.sync import Moment, Sync
from manyhands.values.errors import ConfigError, TaskError
from manyhands.values.kernels import Kernels
from manyhands.values.messages import Measured, Merged
from manyhands.values.task import BatchLoss, Task, objective_of
from manyhands.values.work_in_hand import Kind
from manyhands.values.worker_orders import Orders
from manyhands.worker import compare_workers
from manyhands.worker.readers.one_stream import OneStream
from manyhands.worker.readers.open_feed import open_feed
from manyhands.worker.readers.read_ahead import ReadAhead
from manyhands.worker.readers.stream_ring import RING_AT, has_ring
from manyhands.worker.watched_feed import WatchedFeed

if TYPE_CHECKING:
    from manyhands.data.fetching.peer_sharing import Sharing


@dataclass(frozen=True, slots=True)
class WorkerParts:
    task: Task
    loss: LossFn
    device: torch.device
    replica: Replica
    feed: WatchedFeed
    held_out: Records | None
    sharing: "Sharing | None"
    """Its part in the exchange of shards between hosts."""
    auditor: compare_workers.Recheck
    sync: Sync
    built: bytes
    """What the model and the data look like, for others to compare with theirs."""


def build_worker(
    orders: Orders,
    channel: WorkerChannel,
    listener: PeerListener,
    moment: Moment,
    kernels: Kernels,
    nursery: Nursery | None,
) -> WorkerParts:
    train = orders.config.train
    task = ship_task.unpack(orders.parcel, orders.task_fd)
    device = build_training.choose_device(train, orders.worker)
    memory = state_memory(orders)
    own_process = threading.current_thread() is threading.main_thread()
    replica = build_training.replica(
        task,
        train,
        memory,
        device,
        protect=own_process,
        epoch_of=lambda step: feed.cut(step).epoch,
    )
    loss = _loss(task, replica, orders, channel)

    def fetched(done: int, total: int) -> None:
        """Before it has joined; so that nobody thinks it will not come."""
        channel.heartbeat.progress += 1

    feed, held_out = open_feed(task, orders.config)
    records = feed.records
    make_ready(records, held_out, workers=1, fetch="missing", progress=fetched)
    replica.schedules.ends_epoch = feed.ends_epoch
    _see_that_scores_come(replica, orders, held_out)
    drag = partial(orders.faults.drag, orders.order)
    if feed.stream is not None:  # readers of its own would each read all of it
        nursery = None
        feed.watch_stream(partial(fetched, 0, 0), SIGN_OF_LIFE)  # it may have to skip much
    ahead = ReadAhead(feed, orders, channel, nursery)
    if feed.stream is not None:
        ahead.stream = OneStream(feed, orders, channel, own_process=own_process)
    twice = task.batch_loss is not None
    watched = WatchedFeed(feed, channel, device, moment, drag, ahead, twice=twice)
    servers = orders.config.servers
    merges = servers is not None and servers.merges
    if merges and feed.stream is not None:
        raise ConfigError(
            "a stream is read in one order, and with server.mode other than sync workers compute "
            'steps as they come. Use server.mode = "sync" (or --sync allreduce).'
        )
    leaves = build_training.leaves(task, replica, train, watched, merges=merges)
    auditor = compare_workers.Recheck(replica, watched, loss, leaves, train, moment)
    rendezvous = Path(orders.run) / ".rendezvous"
    peers = build_training.PeerAccess(
        listener, orders.secret, orders.encrypt, rendezvous, _telling_of_links(replica, channel)
    )
    collective = build_training.collective(
        orders.collective,
        train,
        memory,
        device=device,
        reach=peers,
        patience=channel.waiting,
    )
    load = LoadMeter()
    channel.heartbeat.load = load.take
    sync = build_training.strategy(
        task,
        train,
        replica,
        memory,
        collective,
        leaves,
        heard=channel.heard,
        moment=moment,
        auditor=auditor,
        feed=watched,
        servers=servers,
        met=partial(_tell_of_pushes, channel),
        load=load,
        record=Recorder(orders.faults.history, orders.worker, memory.fd),
    )
    ahead.dealt = sync.indices
    built = compare_workers.describe(replica, records, kernels)
    at = listener.address.rpartition(":")[0]
    sharing = share(records, held_out, orders.config.data, orders.secret, at)
    return WorkerParts(
        task, loss, device, replica, watched, held_out, sharing, auditor, sync, built
    )


def state_memory(orders: Orders) -> Memory:
    """For the state: shared with the other workers of the host, below the ring of a stream."""
    if orders.collective in PRIVATE:
        return Memory(None)
    remedy = "The rest is for the process that reads the stream: set data.readers = 0."
    room = Room(RING_AT, remedy) if has_ring(orders) else None
    return Memory(orders.state_fd, room)


def _see_that_scores_come(replica: Replica, orders: Orders, held_out: Records | None) -> None:
    if replica.schedules.on_scores and held_out is None and not orders.replays:
        raise TaskError(
            "Task: ReduceLROnPlateau waits for scores of held-out records while it trains. Give "
            "held_out=0.1 (or records of their own). They are scored once an epoch; evaluate.by "
            "says which score it hears, evaluate.every_steps=... scores more often."
        )


def _loss(task: Task, replica: Replica, orders: Orders, channel: WorkerChannel) -> LossFn:
    """The task's; or the same in a debugger, when its micro-batch has come."""
    debug = orders.debug

    def stops(function: Callable[..., Any], kind: Kind = "compute") -> Callable[..., Any]:
        """Once: with a batch loss, micro-batches come twice."""
        if debug is None:
            return function
        step, index = debug
        due = True

        def called(*arguments: Any) -> Any:
            nonlocal due
            work = channel.heartbeat.work
            here = work.kind == kind and work.step == step and work.index in (-1, index)
            if not (due and here):
                return function(*arguments)
            due = False
            return pdb.Pdb(nosigint=True).runcall(function, *arguments)

        return called

    if isinstance(task.loss, Mapping):
        losses = {name: stops(loss) for name, loss in task.loss.items()}
        return lambda model, batch: losses[replica.phase](model, batch)
    loss = objective_of(task)
    assert loss is not None
    if isinstance(loss, BatchLoss):
        return BatchLoss(stops(loss.embed), stops(loss.batch_loss, "batch_loss"))
    return stops(loss)


def _tell_of_pushes(channel: WorkerChannel, generation: int, step: int, tally: Tally) -> None:
    """What has been applied, by whom, is for the ledger."""
    channel.send(
        Merged(
            worker=channel.heartbeat.worker,
            step=step,
            of=generation,
            applied=list(tally.applied.words),
            computed=list(tally.computed),
            staleness=list(tally.staleness.counts),
        )
    )


def _telling_of_links(
    replica: Replica, channel: WorkerChannel
) -> Callable[[list[tuple[int, float, float]]], None]:
    """What was measured between hosts is told to the supervisor."""

    def tell(links: list[tuple[int, float, float]]) -> None:
        lanes = replica.layout.trainable_sizes
        size = sum(dtype.itemsize * count for dtype, count in lanes.items())
        channel.send(Measured(worker=channel.heartbeat.worker, links=links, gradient_bytes=size))

    return tell
