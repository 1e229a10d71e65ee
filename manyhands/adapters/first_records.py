# SPDX-License-Identifier: Apache-2.0
"""drop_last of trainers that accumulate: an epoch leaves out what fills no batch of their loader,
which is one micro-batch here. What is left need not fill the last step."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, RandomSampler, SequentialSampler


@dataclass(frozen=True)
class FirstRecords:
    """What a sampler gives first."""

    sampler: Any
    kept: int

    def __iter__(self) -> Iterator[int]:
        return islice(iter(self.sampler), self.kept)

    def __len__(self) -> int:
        return self.kept


def first_records(sampler: Any, kept: int) -> Any:
    """Shuffles and rows stay such, so that they are drawn by position."""
    if type(sampler) is RandomSampler and not sampler.replacement:
        size = len(sampler.data_source)
        return RandomSampler(range(size), num_samples=kept, generator=sampler.generator)
    if type(sampler) is SequentialSampler:
        return range(kept)
    return FirstRecords(sampler, kept)


def whole_batches(loader: Any) -> Any:
    """A loader with drop_last, as one whose sampler ends with the last whole batch."""
    records = len(loader.sampler)
    kept = records - records % loader.batch_size
    if not loader.drop_last or kept == 0:
        return loader
    return DataLoader(
        loader.dataset,
        loader.batch_size,
        sampler=first_records(loader.sampler, kept),
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        worker_init_fn=loader.worker_init_fn,
        generator=loader.generator,
    )
