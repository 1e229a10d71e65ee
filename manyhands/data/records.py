# SPDX-License-Identifier: Apache-2.0
"""Records behind one small contract: how many there are, and a batch of any of them.

`Columns` holds a dict of tensors or arrays with one row per record; a batch is the same dict with
the chosen rows. `Items` holds a map-style Dataset; its items are fetched one by one, in the
worker's own thread, and collated as torch's DataLoader would.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import default_collate

from manyhands.data.order import Positions, permutation
from manyhands.deal import Batch
from manyhands.errors import TaskError
from manyhands.task import user_traceback

# torch cannot take rows of these.
_WIDER = {torch.uint16: torch.int32, torch.uint32: torch.int64}


class Records(Protocol):
    draws_randomness: bool
    """Whether fetching may run user code that draws random numbers (and so wants seeding)."""

    def __len__(self) -> int: ...
    def batch(self, ids: Positions) -> Batch: ...


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

    def batch(self, ids: Positions) -> Batch:
        rows = torch.from_numpy(ids)
        return {name: column.index_select(0, rows) for name, column in self.columns.items()}


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

    def batch(self, ids: Positions) -> Batch:
        return default_collate([self.dataset[i] for i in ids.tolist()])


class Part:
    """Some of the records of another, by their numbers there (8 bytes a record)."""

    def __init__(self, whole: Records, numbers: Positions) -> None:
        self.whole, self.numbers = whole, numbers
        self.draws_randomness = whole.draws_randomness

    def __len__(self) -> int:
        return len(self.numbers)

    def batch(self, ids: Positions) -> Batch:
        return self.whole.batch(self.numbers[ids])


def record_ids(records: Records, ids: Positions) -> Sequence[int]:
    """The user's own numbering of records, for messages."""
    return (records.numbers[ids] if isinstance(records, Part) else ids).tolist()


def open_data(data: Any, held_out: Any) -> tuple[Records, Records | None]:
    """Training and held-out records of a task; complains about what cannot be read."""
    train = _records(data, "data")
    if len(train) == 0:
        raise TaskError("Task: data is empty (0 records).")
    if held_out is None:
        return train, None
    if isinstance(held_out, float):
        return _set_aside(train, held_out)
    kept = _records(held_out, "held_out")
    if len(kept) == 0:
        raise TaskError("Task: held_out is empty (0 records); leave it out to hold out nothing.")
    return train, kept


def _set_aside(records: Records, fraction: float) -> tuple[Records, Records]:
    """The split does not depend on train.seed: other seeds must not see other held-out records."""
    size = len(records)
    held = min(size - 1, max(1, round(size * fraction)))
    if size < 2:
        raise TaskError(f"Task: held_out = {fraction} of {size} record leaves nothing to train on.")
    split = permutation(size, "held out")
    return Part(records, split[range(held, size)]), Part(records, split[range(held)])


def _records(data: Any, where: str) -> Records:
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
            "Give a dict of tensors or a map-style Dataset (__len__ and __getitem__): exact "
            "order needs to reach any record."
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
    """A cheap mark of the data: size and, for columns, types and 64 evenly spaced rows.

    It is meant to notice that a run is resumed on other data, not to prove that it is the same.
    """
    digest = hashlib.sha256(f"{len(records)}".encode())
    whole = records.whole if isinstance(records, Part) else records
    if isinstance(whole, Columns):
        rows = torch.arange(64) * max(0, len(whole) - 1) // 63
        for name, column in whole.columns.items():
            digest.update(f"{name} {column.dtype} {tuple(column.shape)}".encode())
            chosen = column.index_select(0, rows).contiguous().reshape(-1).view(torch.uint8)
            digest.update(chosen.numpy().tobytes())
    return digest.hexdigest()
