# SPDX-License-Identifier: Apache-2.0
"""A task's sampler or weights → how an epoch draws its records.

torch's own samplers are understood: what they mean is drawn by keyed functions of (seed, epoch,
position). Any other is run once an epoch (`own_sampler`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from manyhands.data.columns.array_types import Positions
from manyhands.data.ordering.own_sampler import OwnSampler
from manyhands.data.ordering.sampling import (
    Balanced,
    FirstPositions,
    InOrder,
    Repeated,
    Sampling,
    Weighted,
    read_classes,
    read_weights,
)
from manyhands.data.reading.records import Records
from manyhands.data.reading.sampled_records import SampledRecords
from manyhands.values.errors import TaskError

LABELS = ("label", "labels", "y", "target", "targets")
"""Where `sampler="balanced"` looks for classes."""


@dataclass(frozen=True)
class BalancedClasses:
    """`mh.balanced(labels)`: a sampler that draws every class equally often."""

    labels: Any
    samples: int | None = None


def balanced(labels: Any, samples: int | None = None) -> BalancedClasses:
    """A sampler for `mh.Task(sampler=...)`: every class equally often, and in a class every record.

    `labels` is one for each record of `data`: a tensor, an array or a list. `samples` is how many
    records an epoch draws; left out, as many as there are.
    """
    return BalancedClasses(labels, samples)


@dataclass(frozen=True)
class AskedSampling:
    """How a task wants its records drawn."""

    data: Any
    sampler: Any = None
    weights: Any = None
    replacement: bool = True
    in_part: bool = False
    """Some of `data` is held out: the records are the rest."""


def sampled(
    records: Records, asked: AskedSampling, seed: int, whole_batches: int | None
) -> Records:
    """The records, drawn as asked; with `whole_batches` of so many, an epoch ends with the last."""
    if type(asked.sampler) is SubsetRandomSampler:
        records = subset(records, asked.sampler, "data", in_part=asked.in_part)
        asked = AskedSampling(asked.data, in_part=asked.in_part)
    found = _sampling(records, asked, seed)
    if whole_batches is not None:
        found = _whole(records, found, whole_batches)
    return records if found is None else SampledRecords(records, found)


def subset(records: Records, sampler: Any, where: str, *, in_part: bool = False) -> Records:
    """Those that a SubsetRandomSampler names, as records of their own."""
    _refuse_generator(sampler)
    if in_part:
        raise _not_in_part(sampler)
    chosen = np.asarray([int(i) for i in sampler.indices], dtype=np.int64)
    if len(chosen) == 0 or chosen.min() < 0 or chosen.max() >= len(records):
        raise TaskError(
            f"Task: the SubsetRandomSampler of {where} names {len(chosen)} records, not all of "
            f"them from 0 to {len(records) - 1}."
        )
    return records.part(chosen)


def _sampling(records: Records, asked: AskedSampling, seed: int) -> Sampling | None:
    """None: every record once, shuffled."""
    sampler, size = asked.sampler, len(records)
    names = records.names(np.arange(size))
    if asked.weights is not None:
        weights = read_weights(asked.weights, "weights", _whole_size(asked, size))
        return Weighted(weights[_numbers(names)], None, replacement=asked.replacement)
    if isinstance(sampler, str) and sampler == "balanced":
        sampler = BalancedClasses(_labels(asked.data))
    match sampler:
        case None:
            return None
        case BalancedClasses(labels=labels, samples=samples):
            classes = read_classes(labels, "labels", _whole_size(asked, size))
            _, there = np.unique(classes[_numbers(names)], return_inverse=True)
            return Balanced(there.astype(np.int64), samples)
        case SequentialSampler() if type(sampler) is SequentialSampler:
            return InOrder(names)
        case RandomSampler() if is_shuffle(sampler, _whole_size(asked, size)):
            _refuse_generator(sampler)
            return None
        case DistributedSampler():
            raise TaskError(
                "Task: DistributedSampler deals records to processes, which is done here by "
                "micro-batch. Leave it out; for its shuffle, RandomSampler or nothing."
            )
        case BatchSampler():
            raise TaskError(
                "Task: a BatchSampler gives batches, and those are cut by train.batch. Give the "
                "sampler that is inside of it."
            )
        case str() | Mapping():
            raise TaskError(
                f"Task: sampler = {sampler!r} is none; give a torch Sampler, an iterable of record "
                'numbers, mh.balanced(labels) or "balanced".'
            )
        case _ if asked.in_part:
            raise _not_in_part(sampler)
        case _:
            return _of_torch(sampler, size) or _own(sampler, size, seed)


def is_shuffle(sampler: Any, size: int) -> bool:
    """Every record once, which is what is done anyway."""
    plain = type(sampler) is RandomSampler and not sampler.replacement
    return plain and sampler.num_samples == size == len(sampler.data_source)


def _of_torch(sampler: Any, size: int) -> Sampling | None:
    """What its own samplers mean; None: it is somebody else's, or over something else."""
    if type(sampler) is WeightedRandomSampler:
        _refuse_generator(sampler)
        weights = read_weights(sampler.weights, "weights of the sampler", size)
        return Weighted(weights, int(sampler.num_samples), replacement=sampler.replacement)
    if type(sampler) is RandomSampler and len(sampler.data_source) == size:
        _refuse_generator(sampler)
        if sampler.replacement:
            return Weighted(np.ones(size), sampler.num_samples, replacement=True)
        return Repeated(size, sampler.num_samples)
    return None


def _own(sampler: Any, size: int, seed: int) -> Sampling:
    if not isinstance(sampler, Iterable):
        raise TaskError(
            f"Task: sampler is {type(sampler).__name__}, which is no iterable of record numbers."
        )
    return OwnSampler(sampler, size, seed)


def _whole(records: Records, found: Sampling | None, batch: int) -> Sampling | None:
    positions = len(records) if found is None else found.positions
    kept = positions - positions % batch
    if kept == positions:
        return found
    if kept == 0:
        raise TaskError(
            f"Task: the DataLoader of data has drop_last=True, and its {positions} records are "
            f"fewer than one batch (train.batch = {batch})."
        )
    return Repeated(positions, kept) if found is None else FirstPositions(found, kept)


def _whole_size(asked: AskedSampling, size: int) -> int:
    """Of `data`, before some were held out."""
    if not asked.in_part:
        return size
    if isinstance(asked.data, Mapping):
        return len(next(iter(asked.data.values())))
    return len(asked.data)


def _numbers(names: Any) -> Positions:
    return np.asarray(names, dtype=np.int64)


def _labels(data: Any) -> Any:
    """What is called so in a dict of columns, in a Hugging Face data set, or `.targets`."""
    names: Any = data if isinstance(data, Mapping) else getattr(data, "column_names", ())
    for name in LABELS:
        if name in names:
            return data[name]
    if (targets := getattr(data, "targets", None)) is not None:
        return targets
    raise TaskError(
        f'Task: sampler="balanced" finds no labels in data (no column called {", ".join(LABELS)}). '
        "Give them: sampler=mh.balanced(labels), one for each record."
    )


def _refuse_generator(sampler: Any) -> None:
    if sampler.generator is not None:
        raise TaskError(
            f"Task: {type(sampler).__name__} has a generator of its own; what is drawn follows "
            "from train.seed. Leave the generator out."
        )


def _not_in_part(sampler: Any) -> TaskError:
    return TaskError(
        f"Task: {type(sampler).__name__} draws from all of data, and held_out is a fraction of it, "
        "which would be trained on. Give held_out as data of its own; or weights=, or "
        "mh.balanced(labels), which leave out what is held out."
    )
