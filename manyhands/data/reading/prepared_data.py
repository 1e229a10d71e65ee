# SPDX-License-Identifier: Apache-2.0
"""Which records of a prepared folder a task wants, and how batches should hold them: a value.

Nothing is read here, and Arrow is not imported: `shard_records` opens what this names.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from manyhands.data.ordering.record_randomness import Transform
from manyhands.data.shards.prepared_url import FolderOrUrl, folder_of

if TYPE_CHECKING:
    from manyhands.data.fetching.transfer import Transfer

Pad = Literal["longest", "flat"] | int
"""Rows of different lengths in a batch: filled up with zeros to the longest of them; one after the
other, with offsets; or cut and filled up to this length."""


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
    batches: see `data.reading.augment`. `window` is how many records are mixed at least (default:
    as many as 128 MiB hold). `transfer` says how shards get here (`data.fetching.transfer`); left
    out, they are here, or come as the [data] settings say.
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
