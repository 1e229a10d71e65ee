# SPDX-License-Identifier: Apache-2.0
"""A torch DataLoader that was given as data: what of it is used, and what is refused by name.

Its data set, collate_fn and sampler are used; its batch_size and num_workers are what the settings
are where nobody says otherwise. How it would move batches (pin_memory, prefetch_factor, timeout,
persistent_workers) is of no account here.
"""

from typing import Any, NamedTuple

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    SequentialSampler,
    default_collate,
)

from manyhands.data.reading.choose_sampling import is_shuffle
from manyhands.data.reading.collate_items import Collate
from manyhands.values.errors import TaskError


class LoaderFacts(NamedTuple):
    dataset: Any
    collate: Collate | None
    """None: torch's own."""
    sampler: Any
    batch: int
    workers: int
    drop_last: bool

    @property
    def plain(self) -> bool:
        """Whether it visits every record once, in order or shuffled, as it does if nobody chose."""
        shuffled = is_shuffle(self.sampler, len(self.dataset))
        return shuffled or type(self.sampler) is SequentialSampler


def loader_facts(loader: Any, where: str) -> LoaderFacts | None:
    """None: it is no DataLoader."""
    if not isinstance(loader, DataLoader):
        return None
    given: Any = loader
    if isinstance(given.dataset, IterableDataset):
        raise TaskError(
            f"Task: {where} is a DataLoader over {type(given.dataset).__name__}, an "
            "IterableDataset: streams are given as they are, without a loader: "
            f"{where}=THE_DATASET, collate=..., with train.batch and data.shuffle_window."
        )
    if given.batch_size is None:
        if type(given.batch_sampler) is not BatchSampler and given.batch_sampler is not None:
            raise _refused(
                where,
                f"batch_sampler ({type(given.batch_sampler).__name__})",
                "batches are cut by train.batch and train.micro_batch, so that they do not depend "
                "on the number of workers",
                "Give a sampler, which says which records and in which order: DataLoader(..., "
                "sampler=...) or mh.Task(sampler=...)",
            )
        if given.batch_sampler is None:
            raise _refused(
                where,
                "batch_size=None",
                "its records are batches already, which cannot be cut",
                "Give a data set of single records",
            )
    if given.worker_init_fn is not None:
        raise _refused(
            where,
            "worker_init_fn",
            "torch, numpy.random and random are seeded for every micro-batch, and records do not "
            "depend on the process that fetches them",
            "Leave it out, and open what records need when they are first asked for, in "
            "__getitem__",
        )
    if given.generator is not None:
        raise _refused(
            where,
            "generator",
            "the order of records follows from train.seed",
            "Leave it out, and choose the order with train.seed",
        )
    inner = given.batch_sampler
    collate = None if given.collate_fn is default_collate else given.collate_fn
    return LoaderFacts(
        given.dataset,
        collate,
        inner.sampler if given.batch_size is None else given.sampler,
        inner.batch_size if given.batch_size is None else given.batch_size,
        given.num_workers,
        inner.drop_last if given.batch_size is None else given.drop_last,
    )


def _refused(where: str, what: str, because: str, instead: str) -> TaskError:
    return TaskError(f"Task: {where} is a DataLoader with {what}: {because}. {instead}.")
