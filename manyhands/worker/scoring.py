# SPDX-License-Identifier: Apache-2.0
"""How a task is scored on its held-out records, while it trains and afterwards."""

import copy
import math
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn import Module

from manyhands.data.open_data import open_task
from manyhands.data.reading.micro_batch_feed import held_out_batches, on_device
from manyhands.data.reading.records import Records
from manyhands.evaluation import scores
from manyhands.launch.wire.control_channel import WorkerChannel
from manyhands.training.compute import micro_batch_gradient
from manyhands.training.compute.kernel_marks import fix_kernels
from manyhands.training.compute.seeds import seed_everything
from manyhands.training.memory.memory import Memory
from manyhands.training.state.build_optimizer import build_optimizer
from manyhands.training.state.replica import Replica, build_model
from manyhands.values.config import RunConfig
from manyhands.values.errors import RequestError
from manyhands.values.messages import Reply, RoundPart, Scored
from manyhands.values.task import Task, objective_of
from manyhands.values.world import World
from manyhands.worker.checkpoint_part import load_model, load_tables


def evaluation_of(task: Task, config: RunConfig) -> scores.Evaluation:
    return scores.Evaluation(
        objective_of(task),
        micro_batch_gradient.read_loss,
        task.predict,
        task.scores,
        config.train.precision,
    )


def my_indices(held_out: Records, config: RunConfig, world: World) -> range:
    """The batches that this rank scores: contiguous, near equal in number."""
    rank, ranks = world.rank, world.num_ranks
    count = math.ceil(len(held_out) / config.evaluation_batch)
    return range(count * rank // ranks, count * (rank + 1) // ranks)


def batches_of(
    held_out: Records, config: RunConfig, indices: Iterable[int], device: torch.device
) -> Iterator[tuple[int, int, Any]]:
    """These batches, each fetched when its index has been taken."""
    batches = held_out_batches(
        held_out,
        batch=config.evaluation_batch,
        indices=indices,
        seed=config.train.seed,
        seeder=seed_everything,
    )
    return ((i, n, on_device(b, device)) for i, n, b in batches)


def score_portably(config: RunConfig, stacklevel: int) -> None:
    """Scores of a portable run are computed with its kernels, where this process still can."""
    if config.train.portable:
        try:
            fix_kernels()
        except RequestError as error:
            warnings.warn(f"{error} Scores may differ in their last bits.", stacklevel=stacklevel)


def measured(task: Task, config: RunConfig, folder: Path, world: World) -> list[scores.BatchResult]:
    """This rank's part of the held-out records, scored with a saved step's weights."""
    _, held_out = open_task(task, config)
    assert held_out is not None and task.optimizer is not None
    threads, cpu = torch.get_num_threads(), torch.device("cpu")
    torch.set_num_threads(config.train.threads)  # part of the bits
    try:
        seed_everything(config.train.seed, "model")
        given = copy.deepcopy(task.model) if isinstance(task.model, Module) else task.model
        model, seed = build_model(given), config.train.seed
        replica = Replica(model, build_optimizer(task, model), None, Memory(None), cpu, seed=seed)
        load_model(replica, folder, config.scored_weights)
        load_tables(replica, folder)
        batches = batches_of(held_out, config, my_indices(held_out, config, world), cpu)
        return scores.measure(evaluation_of(task, config), model, batches)
    finally:
        torch.set_num_threads(threads)


def score_together(
    evaluation: scores.Evaluation,
    replica: Replica,
    batches: Iterable[tuple[int, int, Any]],
    line: WorkerChannel,
    *,
    weights: str,
    leads: bool,
    heard: bool,
) -> Reply:
    """Score the held-out records with the other workers; the reply says whether to stop, and what
    schedules hear (if they do: `heard`). `weights`: the trained ones, or which average of them."""
    replica.buffers.show()
    with replica.showing(weights):
        results = scores.measure(evaluation, replica.model, batches)
    step, heartbeat = replica.step, line.heartbeat
    heartbeat.begin("score", step)
    round = f"evaluate-{step}"
    line.send(RoundPart(worker=heartbeat.worker, round=round, payload=scores.encode(results)))
    if leads:
        found = scores.combine(evaluation, scores.decode(line.reply(round).parts))
        line.send(heartbeat.beat())  # the steps before the scores of the last of them
        line.send(
            Scored(
                worker=line.heartbeat.worker,
                step=step,
                round=f"scores-{step}",
                scores=found,
                heard=heard,
            )
        )
    return line.reply(f"scores-{step}")


def watched(indices: Iterable[int], line: WorkerChannel, step: int) -> Iterator[int]:
    """Batches of held-out records, each noted before anything is done about it."""
    for index in indices:
        line.stop_if_broken()
        line.heartbeat.begin("evaluate", step, index)
        yield index
