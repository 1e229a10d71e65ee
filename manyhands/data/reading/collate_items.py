# SPDX-License-Identifier: Apache-2.0
"""Items of a map-style Dataset → a batch: by the task's own collate, or as DataLoader would by
default. Records that do not fit together are told apart: which, where, and what to do about it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import default_collate

from manyhands.accounting.deal_micro_batches import Batch
from manyhands.values.errors import TaskError
from manyhands.values.user_frames import place_of

Collate = Callable[[list[Any]], Batch]
"""The records of a micro-batch → a batch."""

REMEDY = (
    "Give the task a function that makes a batch of a list of records: mh.Task(..., "
    "collate=lambda records: ...). See docs/task.md."
)

_PLAIN = (str, bytes, bool, int, float, complex, np.generic)


def collated(items: list[Any], numbers: Sequence[int], collate: Collate | None) -> Batch:
    """`numbers` are the records', for messages."""
    if collate is not None:
        batch = collate(items)
        if batch is None:
            place = place_of(collate)
            raise TaskError(
                f"collate{f' ({place})' if place else ''} returned None for {len(items)} records; "
                "it must return the batch. Does it end with `return`?"
            )
        return batch
    try:
        return default_collate(items)
    except (TypeError, RuntimeError, KeyError, ValueError) as error:
        if (text := why_not(items, numbers)) is None:
            raise
        raise TaskError(f"{text} {REMEDY}") from error


def why_not(items: Sequence[Any], numbers: Sequence[int]) -> str | None:
    """Which record keeps these from being one batch, in a sentence; None: it cannot be told."""
    for number, item in zip(numbers, items, strict=True):
        if (found := _unfit(item, "")) is not None:
            place, what = found
            return f"record {number}{place} is {what}, of which no batch can be made."
    for number, item in zip(numbers[1:], items[1:], strict=True):
        if (apart := _apart(items[0], item, "")) is not None:
            place, first, other = apart
            return (
                f"records cannot be made into one batch: record {number}{place} {other}, where "
                f"record {numbers[0]}{place} {first}."
            )
    return None


def _unfit(item: Any, place: str) -> tuple[str, str] | None:
    """What default collation knows nothing of: its place in the record, and what it is."""
    if item is None:
        return place, "None"
    for inside, value in _parts(item):
        if (found := _unfit(value, f"{place}[{inside!r}]")) is not None:
            return found
    if isinstance(item, np.ndarray) and item.dtype.kind in "SUO":
        return place, f"an array of {item.dtype}"
    known = isinstance(item, (torch.Tensor, np.ndarray, Mapping, Sequence, *_PLAIN))
    return None if known else (place, f"of type {type(item).__name__}")


def _apart(first: Any, other: Any, place: str) -> tuple[str, str, str] | None:
    """The first place at which two records are unlike, and what is there in each."""
    one, two = _kind(first), _kind(other)
    if one != two:
        return place, one, two
    parts = dict(_parts(first))
    for inside, value in _parts(other):
        if (found := _apart(parts[inside], value, f"{place}[{inside!r}]")) is not None:
            return found
    return None


def _kind(item: Any) -> str:
    """As a predicate: what must be equal in all records of a batch."""
    if isinstance(item, torch.Tensor | np.ndarray):
        return f"has the shape {tuple(item.shape)}"
    if isinstance(item, Mapping):
        keys = ", ".join(sorted(str(key) for key in cast("Mapping[Any, Any]", item)))
        return f"has the keys {keys}" if keys else "has no keys"
    if isinstance(item, str | bytes):
        return f"is {type(item).__name__}"
    if isinstance(item, Sequence):
        return f"has the length {len(cast('Sequence[Any]', item))}"
    return "is a number" if isinstance(item, _PLAIN) else f"is {type(item).__name__}"


def _parts(item: Any) -> list[tuple[Any, Any]]:
    if isinstance(item, Mapping):
        return list(cast("Mapping[Any, Any]", item).items())
    if isinstance(item, Sequence) and not isinstance(item, str | bytes):
        return list(enumerate(cast("Sequence[Any]", item)))
    return []
