# SPDX-License-Identifier: Apache-2.0
"""The micro-batches of a task, opened by whoever fetches them: a worker, or a reader of it."""

from manyhands.accounting.phases import phases_of
from manyhands.data.open_data import open_task
from manyhands.data.reading.micro_batch_feed import MicroBatchFeed
from manyhands.data.reading.records import Records
from manyhands.training.compute.seeds import seed_everything
from manyhands.values.config import RunConfig
from manyhands.values.task import Task


def open_feed(task: Task, config: RunConfig) -> tuple[MicroBatchFeed, Records | None]:
    """... and the held-out records."""
    train = config.train
    records, held_out = open_task(task, config)
    feed = MicroBatchFeed(
        records,
        seed=train.seed,
        batch=train.batch,
        micro_batch=train.micro_batch_size,
        seeder=seed_everything,
        phases=phases_of(task),
    )
    return feed, held_out
