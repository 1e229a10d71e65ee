# SPDX-License-Identifier: Apache-2.0
"""Records behind one small contract: how many there are, in which order they want to be read, and
a batch of any of them.

`Columns` holds a dict of tensors or arrays with one row per record; a batch is the same dict with
the chosen rows. `Items` holds a map-style Dataset; its items are fetched one by one, in the
worker's own thread, and collated as torch's DataLoader would. `data.prepared` reads shards.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import torch
from torch.utils.data import default_collate

from manyhands.accounting.micro_batches import Batch
from manyhands.data.ordering.epoch_order import (
    FIRST,
    Order,
    Positions,
    RecordVisit,
    order,
    permutation,
)
from manyhands.data.ordering.record_randomness import Transform
from manyhands.data.shards.prepared_url import FolderOrUrl, RemoteFolder, folder_of
from manyhands.values.config import DataConfig
from manyhands.values.errors import TaskError
from manyhands.values.task import user_traceback

if TYPE_CHECKING:
    from manyhands.data.fetching.peer_sharing import Sharing
    from manyhands.data.fetching.transfer import BytesProgress, Transfer
    from manyhands.data.reading.shard_records import ShardRecords
    from manyhands.data.shards.manifest import Listing

# torch cannot take rows of these.
_WIDER = {torch.uint16: torch.int32, torch.uint32: torch.int64}


Pad = Literal["longest", "flat"] | int
"""Rows of different lengths in a batch: filled up with zeros to the longest of them; one after the
other, with offsets; or cut and filled up to this length."""


class Records(Protocol):
    draws_randomness: bool
    """Whether fetching may run user code that draws random numbers (and so wants seeding)."""

    def __len__(self) -> int: ...

    def order(self, seed: int, epoch: int) -> Order:
        """The order in which an epoch visits all of them."""
        ...

    def batch(self, ids: Positions, visit: RecordVisit = FIRST) -> Batch:
        """These records (0 to len - 1). The visit is for those who vary records at random."""
        ...

    def part(self, numbers: Positions) -> "Records":
        """Some of them as records of their own, numbered anew in whichever order suits."""
        ...

    def names(self, ids: Positions) -> Sequence[int]:
        """The user's own numbers of these records, for messages."""
        ...

    def mark(self) -> bytes:
        """Something that other data would most likely not have; cheap."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedData:
    """Which records of a prepared folder, and how batches should hold them. See `prepared`."""

    folder: FolderOrUrl
    split: str = "train"
    columns: tuple[str, ...] | None = None
    stack: Mapping[str, tuple[str, ...]] | None = None
    pad: Pad = "longest"
    transform: Transform | None = None
    verify: bool = True
    window: int | None = None
    transfer: "Transfer | None" = None


def prepared(
    folder: str | Path,
    split: str = "train",
    *,
    columns: Sequence[str] | None = None,
    stack: Mapping[str, Sequence[str]] | None = None,
    pad: Pad = "longest",
    transform: Transform | None = None,
    verify: bool = True,
    window: int | None = None,
    transfer: "Transfer | None" = None,
) -> PreparedData:
    """Prepared data for a task: `mh.Task(data=mh.prepared("data/clicks", pad=128), ...)`.

    `folder` is a path or a URL ("s3://bucket/clicks"). Batches are dicts of tensors: a column's
    numbers, (records,) or (records, *shape); for columns of different lengths also NAME_length (or,
    with pad="flat", NAME_offsets); and `_id`. `columns` are those wanted (default: all but text);
    `stack={"x": ["age", "hours"]}` makes them one float32 matrix. `transform(batch, draw)` changes
    batches: see `data.augment`. `window` is how many records are mixed at least (default: as many
    as 128 MiB hold). `transfer` says how shards get here (`data.hosts.transfer`); left out, they
    are here, or come as the [data] settings say.
    """
    return PreparedData(
        folder=folder_of(folder),
        split=split,
        columns=None if columns is None else tuple(columns),
        stack=None if stack is None else {name: tuple(of) for name, of in stack.items()},
        pad=pad,
        transform=transform,
        verify=verify,
        window=window,
        transfer=transfer,
    )


class Columns:
    draws_randomness = False

    def __init__(self, columns: Mapping[str, Any], where: str) -> None:
        self.columns: dict[str, torch.Tensor] = {}
        for name, values in columns.items():
            self.columns[name] = _column(name, values, where)
        lengths = {name: len(column) for name, column in self.columns.items()}
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{name}: {n}" for name, n in lengths.items())
            raise TaskError(f"Task: the columns of {where} differ in length ({listed}).")
        self.size = next(iter(lengths.values()), 0)

    def __len__(self) -> int:
        return self.size

    def order(self, seed: int, epoch: int) -> Order:
        return order(seed, epoch, self.size)

    def batch(self, ids: Positions, visit: RecordVisit = FIRST) -> Batch:
        rows = torch.from_numpy(ids)
        return {name: column.index_select(0, rows) for name, column in self.columns.items()}

    def part(self, numbers: Positions) -> Records:
        return RecordSubset(self, numbers)

    def names(self, ids: Positions) -> Sequence[int]:
        return ids.tolist()

    def mark(self) -> bytes:
        """Types and 64 evenly spaced rows."""
        rows = torch.arange(64) * max(0, len(self) - 1) // 63
        marks: list[bytes] = []
        for name, column in self.columns.items():
            marks.append(f"{name} {column.dtype} {tuple(column.shape)}".encode())
            chosen = column.index_select(0, rows).contiguous().reshape(-1).view(torch.uint8)
            marks.append(chosen.numpy().tobytes())
        return b"".join(marks)


class Items:
    draws_randomness = True

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        try:
            self.size = len(dataset)
        except Exception as error:
            raise TaskError(
                f"Task: the length of {type(dataset).__name__} cannot be had.\n"
                f"{user_traceback(error)}"
            ) from error

    def __len__(self) -> int:
        return self.size

    def order(self, seed: int, epoch: int) -> Order:
        return order(seed, epoch, self.size)

    def batch(self, ids: Positions, visit: RecordVisit = FIRST) -> Batch:
        return default_collate([self.dataset[i] for i in ids.tolist()])

    def part(self, numbers: Positions) -> Records:
        return RecordSubset(self, numbers)

    def names(self, ids: Positions) -> Sequence[int]:
        return ids.tolist()

    def mark(self) -> bytes:
        return b""


class RecordSubset:
    """Some of the records of another, by their numbers there (8 bytes a record)."""

    def __init__(self, whole: Records, numbers: Positions) -> None:
        self.whole, self.numbers = whole, numbers
        self.draws_randomness = whole.draws_randomness

    def __len__(self) -> int:
        return len(self.numbers)

    def order(self, seed: int, epoch: int) -> Order:
        return order(seed, epoch, len(self))

    def batch(self, ids: Positions, visit: RecordVisit = FIRST) -> Batch:
        return self.whole.batch(self.numbers[ids], visit)

    def part(self, numbers: Positions) -> Records:
        return RecordSubset(self.whole, self.numbers[numbers])

    def names(self, ids: Positions) -> Sequence[int]:
        return self.whole.names(self.numbers[ids])

    def mark(self) -> bytes:
        return self.whole.mark()


def record_ids(records: Records, ids: Positions) -> Sequence[int]:
    """The user's own numbering of records, for messages."""
    return records.names(ids)


_DEFAULTS = DataConfig()

Listings = Callable[[FolderOrUrl], "Listing"]
"""Reads the manifest of a folder; the same one once."""


def open_data(
    data: Any, held_out: Any, settings: DataConfig = _DEFAULTS
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
    data, held_out = _reachable([data, held_out], settings)
    train = _records(data, "data", listings)
    if len(train) == 0:
        raise TaskError("Task: data is empty (0 records).")
    if held_out is None:
        return train, None
    if isinstance(held_out, float):
        return _set_aside(train, held_out)
    kept = _records(held_out, "held_out", listings)
    if len(kept) == 0:
        raise TaskError("Task: held_out is empty (0 records); leave it out to hold out nothing.")
    return train, kept


FetchAmount = Literal["all", "missing", "nothing"]


def make_ready(
    train: Records,
    held_out: Records | None,
    *,
    workers: int,
    quiet: bool = False,
    fetch: FetchAmount = "all",
    progress: "BytesProgress | None" = None,
) -> None:
    """What is to be here before the first step is fetched (of "all", also what is here is checked);
    a cache too small for this many workers of this host is refused."""
    if parts := _transferred(train, held_out):
        from manyhands.data.fetching.fetch_before_start import make_ready as fetch_what_is_needed

        fetch_what_is_needed(parts, workers=workers, quiet=quiet, fetch=fetch, progress=progress)


def share(
    train: Records, held_out: Records | None, settings: DataConfig, secret: bytes, at: str
) -> "Sharing | None":
    """Take part in the exchange of shards between hosts, at this address; None: there is none."""
    if settings.transfer != "peer" or not (parts := _transferred(train, held_out)):
        return None
    from manyhands.data.fetching import peer_sharing

    return peer_sharing.share(parts, settings.placement, secret, at)


def _transferred(*given: Records | None) -> "list[ShardRecords]":
    """Those that do not read a local folder's own files."""
    sharded = [r for r in given if not isinstance(r, Columns | Items | RecordSubset | None)]
    if not sharded:
        return []
    from manyhands.data.reading.shard_records import ShardRecords  # which is loaded by now

    return [r for r in sharded if isinstance(r, ShardRecords) and r.data.transfer is not None]


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
    from manyhands.data.fetching.fetch_before_start import cache_limit, open_cache, open_transfer

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


def _records(data: Any, where: str, listings: Listings) -> Records:
    if isinstance(data, PreparedData):
        from manyhands.data.reading.shard_records import (
            ShardRecords,  # Arrow is not needed by others, and large
        )

        return ShardRecords(data, listing=listings(data.folder))
    if isinstance(data, Mapping):
        if not data:
            raise TaskError(f"Task: {where} is an empty dict; give columns of equal length.")
        return Columns(data, where)
    if isinstance(data, torch.Tensor | np.ndarray):
        raise TaskError(
            f'Task: {where} is a bare array; name its columns: {where}={{"x": ..., "y": ...}}.'
        )
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        raise TaskError(
            f"Task: {where} is {type(data).__name__}, which has no length or cannot be indexed. "
            "Give a dict of tensors, a map-style Dataset (__len__ and __getitem__) or a prepared "
            "folder: exact order needs to reach any record."
        )
    return Items(data)


def _column(name: str, values: Any, where: str) -> torch.Tensor:
    if isinstance(values, torch.Tensor):
        column = values.detach()
    else:
        try:
            column = torch.as_tensor(np.ascontiguousarray(values))
        except (TypeError, ValueError) as error:
            raise TaskError(f"Task: column '{name}' of {where} is not numeric: {error}.") from error
    column = column.to(_WIDER.get(column.dtype, column.dtype))
    if column.dim() == 0:
        raise TaskError(f"Task: column '{name}' of {where} is a single number, not one per record.")
    return column


def sampled_digest(records: Records) -> str:
    """A cheap mark of the data.

    It is meant to notice that a run is resumed on other data, not to prove that it is the same.
    """
    return hashlib.sha256(f"{len(records)}".encode() + records.mark()).hexdigest()
