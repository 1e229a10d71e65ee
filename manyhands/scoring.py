# SPDX-License-Identifier: Apache-2.0
"""How a task is scored on its held-out records, while it trains and afterwards."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from manyhands.config import RunConfig
from manyhands.data.feed import held_out_batches, on_device
from manyhands.data.records import Records
from manyhands.evaluate import scores
from manyhands.task import Task
from manyhands.train import leaf
from manyhands.train.seeds import seed_everything


def evaluation_of(task: Task, config: RunConfig) -> scores.Evaluation:
    assert task.loss is not None
    return scores.Evaluation(
        task.loss, leaf.read_loss, task.predict, task.scores, config.train.precision
    )


def evaluation_batch(config: RunConfig) -> int:
    wanted = config.evaluate.batch if config.evaluate else None
    return wanted or config.train.micro_batch_size


def my_batches(
    held_out: Records, config: RunConfig, rank: int, ranks: int, device: torch.device
) -> Iterator[tuple[int, int, Any]]:
    """The batches that this rank scores: contiguous, near equal in number."""
    size = evaluation_batch(config)
    count = math.ceil(len(held_out) / size)
    mine: Iterable[int] = range(count * rank // ranks, count * (rank + 1) // ranks)
    batches = held_out_batches(
        held_out, batch=size, indices=mine, seed=config.train.seed, seeder=seed_everything
    )
    return ((i, n, on_device(b, device)) for i, n, b in batches)
