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

from manyhands.data.ordering.keyed_permutation import permutation
from manyhands.data.reading.collate_items import Collate
from manyhands.data.reading.prepared_data import PreparedData, prepared
from manyhands.data.reading.records import (
    ColumnRows,
    Columns,
    Items,
    Records,
    RecordSubset,
)
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

Listings = Callable[[FolderOrUrl], "Listing"]
"""Reads the manifest of a folder; the same one once."""


def open_task(task: Task, config: RunConfig) -> tuple[Records, Records | None]:
    """Training and held-out records of a task, as its run reads them."""
    return open_data(task.data, task.held_out, config.data, collate=task.collate)


def open_data(
    data: Any,
    held_out: Any,
    settings: DataConfig = _DEFAULTS,
    *,
    collate: Collate | None = None,
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
        return _stream(data, held_out, settings, collate, listings)
    if is_stream(held_out):
        raise TaskError(_HELD_OUT_STREAM)
    if settings.pass_records is not None or settings.shuffle_window is not None:
        raise TaskError(
            "data.pass_records and data.shuffle_window are for streams; records that can be "
            "reached by their number are counted, and shuffled over the whole epoch."
        )
    data, held_out = _reachable([data, held_out], settings)
    train = _records(data, "data", listings, collate)
    if len(train) == 0:
        raise TaskError("Task: data is empty (0 records).")
    if held_out is None:
        return train, None
    if isinstance(held_out, float):
        return _set_aside(train, held_out)
    kept = _records(held_out, "held_out", listings, collate)
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
    collate: Collate | None,
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
            f"data.readers = {settings.readers}, but data is a stream, which each worker reads by "
            "itself, in sequence. Leave data.readers out."
        )
    (held_out,) = _reachable([held_out], settings)
    train = StreamRecords(
        data, collate, pass_records=settings.pass_records, window=settings.shuffle_window
    )
    kept = None if held_out is None else _records(held_out, "held_out", listings, collate)
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
        r for r in given if not isinstance(r, Columns | Items | RecordSubset | StreamRecords | None)
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
