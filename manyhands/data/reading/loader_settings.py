# SPDX-License-Identifier: Apache-2.0
"""What a DataLoader says about settings: used where nobody has chosen otherwise, and said."""

from collections.abc import Callable
from typing import NamedTuple

from manyhands.data.reading.loader_facts import loader_facts
from manyhands.values.config import MOST_READERS, RunConfig
from manyhands.values.task import Task


class LoaderSettings(NamedTuple):
    batch: int | None
    """train.batch, if nobody has said another."""
    readers: int | None
    """data.readers, likewise."""
    notes: Callable[[RunConfig], list[str]]
    """For the plan: what the config has from it, or not."""


def _nothing(config: RunConfig) -> list[str]:
    return []


def loader_settings(task: Task, *, said: bool) -> LoaderSettings:
    """Of a new run; `said`: somebody chose train.batch."""
    loader = loader_facts(task.data, "data")
    if loader is None:
        return LoaderSettings(None, None, _nothing)
    readers = min(loader.workers, MOST_READERS) or None

    def notes(config: RunConfig) -> list[str]:
        batch, found = config.train.batch, list[str]()
        if not said:
            found.append(f"train.batch: {batch} (the DataLoader's batch_size)")
        elif loader.batch not in (batch, config.train.micro_batch):
            found.append(
                f"train.batch: {batch} (as the config says; the DataLoader's batch_size "
                f"{loader.batch} is not used)"
            )
        if readers is not None and config.data.readers == readers:
            found.append(f"data.readers: {readers} (the DataLoader's num_workers)")
        if loader.drop_last:
            found.append(
                "epoch: leaves out what is no whole batch (as the DataLoader's drop_last says)"
            )
        return found

    return LoaderSettings(None if said else loader.batch, readers, notes)
