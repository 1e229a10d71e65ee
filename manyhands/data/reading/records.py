# SPDX-License-Identifier: Apache-2.0
"""Records behind one small contract: how many there are, in which order they want to be read, and
a batch of any of them.

`Columns` holds a dict of tensors or arrays with one row per record; a batch is the same dict with
the chosen rows. `Items` holds a map-style Dataset; its items are fetched in the worker's own
thread, at once where it can, and collated by the task or as torch's DataLoader would.
`shard_records` reads shards.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

import numpy as np
import torch

from manyhands.accounting.deal_micro_batches import Batch
from manyhands.data.columns.array_types import Positions
from manyhands.data.ordering.epoch_order import FIRST, Order, RecordVisit, order
from manyhands.data.reading.collate_items import Collate, collated
from manyhands.values.errors import TaskError
from manyhands.values.forked_children import one_process
from manyhands.values.user_frames import user_traceback

# torch cannot take rows of these.
_WIDER = {torch.uint16: torch.int32, torch.uint32: torch.int64}


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

    def __init__(self, dataset: Any, collate: Collate | None = None) -> None:
        self.dataset, self.collate = dataset, collate
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
        numbers: list[int] = ids.tolist()
        with one_process():
            return collated(self._items(numbers), numbers, self.collate)

    def _items(self, numbers: list[int]) -> list[Any]:
        """All at once where the data set has a way to (`__getitems__`), as DataLoader does."""
        at_once = getattr(self.dataset, "__getitems__", None)
        if not callable(at_once):
            return [self.dataset[i] for i in numbers]
        items: Any = at_once(numbers)
        if not isinstance(items, Sequence) or len(cast("Sequence[Any]", items)) != len(numbers):
            raise TaskError(
                f"{type(self.dataset).__name__}.__getitems__ was asked for {len(numbers)} records "
                f"and gave {_amount(items)}; it must give a list of as many."
            )
        return list(cast("Sequence[Any]", items))

    def part(self, numbers: Positions) -> Records:
        return RecordSubset(self, numbers)

    def names(self, ids: Positions) -> Sequence[int]:
        return ids.tolist()

    def mark(self) -> bytes:
        """What a data set says of itself: that of Hugging Face keeps a fingerprint."""
        if isinstance(self.dataset, ColumnRows):
            return self.dataset.columns.mark()
        said = getattr(self.dataset, "_fingerprint", None)
        return said.encode() if isinstance(said, str) else b""


class ColumnRows:
    """A dict of columns as a map-style Dataset: of each record, its row of every column."""

    def __init__(self, columns: Columns) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {name: column[number] for name, column in self.columns.columns.items()}

    def __getitems__(self, numbers: list[int]) -> list[dict[str, torch.Tensor]]:
        """Copies: what a collate writes to is not the data."""
        chosen = self.columns.batch(np.asarray(numbers, dtype=np.int64))
        return [{name: rows[k] for name, rows in chosen.items()} for k in range(len(numbers))]


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


def _amount(items: Any) -> str:
    return f"{len(items)}" if hasattr(items, "__len__") else type(items).__name__


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
