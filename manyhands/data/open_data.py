# SPDX-License-Identifier: Apache-2.0
"""What a task gives as its data → records that can be read, here and on other hosts.

Opening fetches nothing but manifests. `make_ready` fetches what is to be here before the first
step, and `share` takes part in the exchange of shards between hosts. Arrow is imported only where
there is a prepared folder.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import SubsetRandomSampler

from manyhands.data.ordering.keyed_permutation import permutation
from manyhands.data.reading.choose_sampling import AskedSampling, sampled, subset
from manyhands.data.reading.collate_items import Collate
from manyhands.data.reading.loader_facts import LoaderFacts, loader_facts
from manyhands.data.reading.prepared_data import PreparedData, prepared
from manyhands.data.reading.records import (
    ColumnRows,
    Columns,
    Items,
    Records,
    RecordSubset,
)
from manyhands.data.reading.sampled_records import SampledRecords
from manyhands.data.reading.stream_records import StreamRecords, is_stream, refuse_used_up
from manyhands.data.shards.prepared_url import FolderOrUrl, RemoteFolder
from manyhands.values.config import DataConfig, RunConfig
from manyhands.values.errors import TaskError
from manyhands.values.task import Task

if TYPE_CHECKING:
    from manyhands.data.fetching.fetch_before_start import FetchAmount
    from manyhands.data.fetching.peer_sharing import Sharing
    from manyhands.data.fetching.transfer import BytesProgress
    from manyhands.data.fetching.wanted_shards import WantedShards
    from manyhands.data.shards.manifest import Listing

_DEFAULTS = DataConfig()

Collates = tuple[Collate | None, Collate | None]
"""Of the training records, and of those that are held out; None: torch's own."""

Listings = Callable[[FolderOrUrl], "Listing"]
"""Reads the manifest of a folder; the same one once."""


def open_task(task: Task, config: RunConfig) -> tuple[Records, Records | None]:
    """Training and held-out records of a task, as its run reads them."""
    loader, held_loader = loader_facts(task.data, "data"), loader_facts(task.held_out, "held_out")
    data = task.data if loader is None else loader.dataset
    held_out = task.held_out if held_loader is None else held_loader.dataset
    train, kept = open_data(
        data,
        held_out,
        config.data,
        collates=(_collate(task, loader), _collate(task, held_loader or loader)),
    )
    if kept is not None and held_loader is not None:
        kept = _as_loaded(kept, held_loader)
    sampler = _sampler(task, loader)
    drops = loader is not None and loader.drop_last
    if sampler is None and task.weights is None and not drops:
        return train, kept
    if isinstance(data, PreparedData | str | Path):
        raise TaskError(
            "Task: sampler and weights are for data in memory and data sets; the shards of a "
            "prepared folder are read in the order in which they lie. Balance it when it is "
            "prepared: manyhands prepare --balance over (or under, or weight)."
        )
    if is_stream(data):
        raise TaskError(
            "Task: sampler and weights choose records by their numbers, and data is a stream, "
            "which is read in sequence. Leave them out; data.shuffle_window mixes neighbours."
        )
    asked = AskedSampling(
        data, sampler, task.weights, task.replacement, isinstance(held_out, float)
    )
    return sampled(train, asked, config.train.seed, config.train.batch if drops else None), kept


def _collate(task: Task, loader: LoaderFacts | None) -> Collate | None:
    if loader is None or loader.collate is None:
        return task.collate
    if task.collate is not None:
        raise TaskError(
            "Task: collate is given, and so is the DataLoader's collate_fn; leave one of them out."
        )
    return loader.collate


def _sampler(task: Task, loader: LoaderFacts | None) -> Any:
    """The task's; or the DataLoader's, if the task has none."""
    chosen = task.sampler is not None or task.weights is not None
    if loader is None:
        return task.sampler
    if chosen and not loader.plain:
        raise TaskError(
            f"Task: the DataLoader of data has a {type(loader.sampler).__name__}, and the task has "
            "a sampler or weights too; leave one of them out."
        )
    return task.sampler if chosen else loader.sampler


def _as_loaded(records: Records, loader: LoaderFacts) -> Records:
    """Held-out records: those that the loader's sampler names; each is scored once."""
    if type(loader.sampler) is SubsetRandomSampler:
        return subset(records, loader.sampler, "held_out")
    if not loader.plain:
        raise TaskError(
            f"Task: held_out is a DataLoader with {type(loader.sampler).__name__}, but every "
            "held-out record is scored once. Leave the sampler out, or name the records with a "
            "SubsetRandomSampler."
        )
    return records


def open_data(
    data: Any,
    held_out: Any,
    settings: DataConfig = _DEFAULTS,
    *,
    collates: Collates = (None, None),
) -> tuple[Records, Records | None]:
    """Training and held-out records of a task; complains about what cannot be read.

    A path or a URL is a prepared folder: its split "train", and to hold out, unless something else
    is given, its split "valid" or else "test". Of a URL only the manifest is fetched here.
    """
    listings = _listings()
    if isinstance(data, str | Path):
        data = prepared(data)
    if isinstance(data, PreparedData):
        data = _in_fold(data, settings.fold, listings)
    elif settings.fold is not None:
        raise TaskError("data.fold is set, but the task's data is not a prepared folder.")
    if isinstance(data, PreparedData) and data.split == "train" and held_out is None:
        held_out = _held_out_split(data, listings)
    if isinstance(held_out, str | Path):
        held_out = _held_out_split(prepared(held_out), listings) or prepared(held_out)
    if is_stream(data):
        return _stream(data, held_out, settings, collates, listings)
    if is_stream(held_out):
        raise TaskError(_HELD_OUT_STREAM)
    if settings.pass_records is not None or settings.shuffle_window is not None:
        raise TaskError(
            "data.pass_records and data.shuffle_window are for streams; records that can be "
            "reached by their number are counted, and shuffled over the whole epoch."
        )
    data, held_out = _reachable([data, held_out], settings)
    train = _records(data, "data", listings, collates[0])
    if len(train) == 0:
        raise TaskError("Task: data is empty (0 records).")
    if held_out is None:
        return train, None
    if isinstance(held_out, float):
        return _set_aside(train, held_out)
    kept = _records(held_out, "held_out", listings, collates[1])
    if len(kept) == 0:
        raise TaskError("Task: held_out is empty (0 records); leave it out to hold out nothing.")
    return train, kept


def prepared_of(data: Any, settings: DataConfig = _DEFAULTS) -> PreparedData | None:
    """What a task's data is, where it is a prepared folder; in its fold, where settings name it."""
    if isinstance(data, str | Path):
        data = prepared(data)
    if not isinstance(data, PreparedData):
        return None
    return data if settings.fold is None else _in_fold(data, settings.fold, _listings())


_HELD_OUT_STREAM = (
    "Task: held_out is a stream, which has no number of records to share out. Give what can be "
    "indexed: held_out=list(itertools.islice(stream, 1000)), say."
)


def _stream(
    data: Any,
    held_out: Any,
    settings: DataConfig,
    collates: Collates,
    listings: Listings,
) -> tuple[Records, Records | None]:
    refuse_used_up(data, "data")
    if isinstance(held_out, float):
        raise TaskError(
            f"Task: held_out = {held_out}, but data is a stream: of records that can only be read "
            "in sequence no fraction can be set aside. Give other records: held_out=[...]."
        )
    if is_stream(held_out):
        raise TaskError(_HELD_OUT_STREAM)
    if settings.readers != "auto" and settings.readers > 0:
        raise TaskError(
            f"data.readers = {settings.readers}, but data is a stream, which is read in sequence: "
            "one process of each host reads it for all workers there. Leave data.readers out; 0: "
            "each worker reads it itself."
        )
    (held_out,) = _reachable([held_out], settings)
    train = StreamRecords(
        data, collates[0], pass_records=settings.pass_records, window=settings.shuffle_window
    )
    kept = None if held_out is None else _records(held_out, "held_out", listings, collates[1])
    return train, kept


def make_ready(
    train: Records,
    held_out: Records | None,
    *,
    workers: int,
    quiet: bool = False,
    fetch: "FetchAmount" = "all",
    progress: "BytesProgress | None" = None,
) -> None:
    """What is to be here before the first step is fetched (of "all", also what is here is checked);
    a cache too small for this many workers of this host is refused."""
    if wanted := _transferred(train, held_out):
        from manyhands.data.fetching import fetch_before_start

        fetch_before_start.make_ready(
            wanted, workers=workers, quiet=quiet, fetch=fetch, progress=progress
        )


def share(
    train: Records, held_out: Records | None, settings: DataConfig, secret: bytes, at: str
) -> "Sharing | None":
    """Take part in the exchange of shards between hosts, at this address; None: there is none."""
    if settings.transfer != "peer" or not (wanted := _transferred(train, held_out)):
        return None
    from manyhands.data.fetching import peer_sharing

    return peer_sharing.share(wanted, settings.placement, secret, at)


def _transferred(*given: Records | None) -> "list[WantedShards]":
    """What does not come from a local folder's own files."""
    sharded = [
        r
        for r in given
        if not isinstance(r, Columns | Items | RecordSubset | SampledRecords | StreamRecords | None)
    ]
    if not sharded:
        return []
    from manyhands.data.fetching.wanted_shards import WantedShards
    from manyhands.data.reading.shard_records import ShardRecords  # which is loaded by now

    wanted: list[WantedShards] = []
    for records in sharded:
        if isinstance(records, ShardRecords) and (transfer := records.data.transfer) is not None:
            name = f"{records.data.split} of {records.data.folder}"
            wanted.append(WantedShards(name, records.shards, transfer, records.open_bytes()))
    return wanted


def _listings() -> Listings:
    def read(folder: FolderOrUrl) -> "Listing":
        from manyhands.data.shards.manifest import read_listing

        return read_listing(folder)

    return cache(read)


def _reachable(given: Sequence[Any], settings: DataConfig) -> list[Any]:
    """Folders behind URLs get a transfer, all of them through one cache."""
    far = [data for data in given if _is_far(data)]
    if not far and settings.cache_limit is None:
        return list(given)
    from manyhands.data.fetching.choose_transfer import cache_limit, open_cache, open_transfer

    cache_limit(settings)  # a wrong one is refused, even where nothing needs it
    shared = open_cache(settings) if far else None
    found: list[Any] = []
    for data in given:
        if shared is not None and _is_far(data):
            data = replace(data, transfer=open_transfer(data.folder, settings, shared))
        found.append(data)
    return found


def _is_far(data: Any) -> bool:
    """Behind a URL, and nobody has said how its shards get here."""
    if not isinstance(data, PreparedData):
        return False
    return isinstance(data.folder, RemoteFolder) and data.transfer is None


def _set_aside(records: Records, fraction: float) -> tuple[Records, Records]:
    """The split does not depend on train.seed: other seeds must not see other held-out records."""
    size = len(records)
    held = min(size - 1, max(1, round(size * fraction)))
    if size < 2:
        raise TaskError(f"Task: held_out = {fraction} of {size} record leaves nothing to train on.")
    split = permutation(size, "held out")
    return records.part(split[range(held, size)]), records.part(split[range(held)])


def _in_fold(data: PreparedData, fold: int | None, listings: Listings) -> PreparedData:
    folds = listings(data.folder).manifest.folds
    if folds == 0:
        if fold is not None:
            raise TaskError(
                f"data.fold = {fold}, but {data.folder} was prepared without folds "
                "(manyhands prepare --folds 5)."
            )
        return data
    if fold is None or fold >= folds:
        asked = "choose one" if fold is None else f"there is no fold {fold}"
        raise TaskError(
            f"{data.folder} has {folds} folds; {asked}: train --fold 0 to {folds - 1}, or --fold "
            "all."
        )
    return replace(data, folder=data.folder / f"fold-{fold}")


def _held_out_split(data: PreparedData, listings: Listings) -> PreparedData | None:
    """What the same folder holds out, if it does, to be read in the same way."""
    splits = listings(data.folder).manifest.splits
    named = next((name for name in ("valid", "test") if name in splits and splits[name].rows), None)
    return None if named is None else replace(data, split=named)


def _which_split(splits: Mapping[str, Any], where: str) -> TaskError:
    """For a DatasetDict of Hugging Face."""
    names = [str(name) for name in splits]
    kept = next((name for name in names if name != "train"), None)
    more = f", held_out=...[{kept!r}]" if where == "data" and kept else ""
    first = "train" if where == "data" and "train" in names else kept or "train"
    return TaskError(
        f"Task: {where} is a {type(splits).__name__} with the splits {', '.join(names)}; choose "
        f"one: {where}=...[{first!r}]{more}."
    )


def _records(data: Any, where: str, listings: Listings, collate: Collate | None) -> Records:
    if isinstance(data, PreparedData):
        if collate is not None:
            raise TaskError(
                f"Task: collate is for records that are items, and {where} is a prepared folder, "
                "which is read in columns. Say how its batches should look with mh.prepared(..., "
                "pad=, stack=, transform=): docs/data.md."
            )
        # Arrow is not needed by others, and large.
        from manyhands.data.reading.shard_records import ShardRecords

        return ShardRecords(data, listing=listings(data.folder))
    if isinstance(data, Mapping):
        if type(data).__module__.partition(".")[0] == "datasets":
            raise _which_split(data, where)
        if not data:
            raise TaskError(f"Task: {where} is an empty dict; give columns of equal length.")
        columns = Columns(data, where)
        return columns if collate is None else Items(ColumnRows(columns), collate)
    if isinstance(data, torch.Tensor | np.ndarray):
        raise TaskError(
            f'Task: {where} is a bare array; name its columns: {where}={{"x": ..., "y": ...}}.'
        )
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        raise TaskError(
            f"Task: {where} is {type(data).__name__}, which has no length or cannot be indexed. "
            "Give a dict of tensors, a map-style Dataset (__len__ and __getitem__) or a prepared "
            "folder; or, to be read in sequence, an iterable without a length, or a function that "
            "yields records."
        )
    return Items(data, collate)
