# SPDX-License-Identifier: Apache-2.0
"""Which records of a prepared folder a task wants, and how batches should hold them: a value.

Nothing is read when it is made, and Arrow is not imported: `shard_records` opens what this names.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from manyhands.data.ordering.record_randomness import Transform
from manyhands.data.shards.prepared_url import FolderOrUrl, folder_of
from manyhands.values.errors import DataError

if TYPE_CHECKING:
    from manyhands.data.fetching.transfer import Transfer

Pad = Literal["longest", "flat"] | int
"""Rows of different lengths in a batch: filled up with zeros to the longest of them; one after the
other, with offsets; or cut and filled up to this length."""

FEATURES = ("",)
"""Of a stack: all numeric features (no column is called that)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedData:
    """Which records of a prepared folder, and how batches should hold them. See `prepared`."""

    folder: FolderOrUrl
    split: str = "train"
    columns: tuple[str, ...] | None = None
    stack: Mapping[str, tuple[str, ...]] | None = None
    """(FEATURES stands for all of them.)"""
    pad: Pad = "longest"
    transform: Transform | None = None
    verify: bool = True
    window: int | None = None
    transfer: "Transfer | None" = None

    def names_in(self, stack: str) -> tuple[str, ...]:
        """What each column of a stack's matrix holds, in order: its length is how wide that is."""
        from manyhands.data.reading.batch_columns import stacked_names, with_features_named
        from manyhands.data.shards.manifest import read_manifest

        manifest = read_manifest(self.folder)
        if manifest.folds:  # which are encoded each by itself, and alike
            manifest = read_manifest(self.folder / "fold-0")
        stacks = with_features_named(self, manifest.schema).stack or {}
        if stack not in stacks:
            raise DataError(f"there is no stack '{stack}'; there are: {', '.join(stacks) or '-'}.")
        return stacked_names(manifest.schema, stacks[stack])


def prepared(
    folder: str | Path,
    split: str = "train",
    *,
    columns: Sequence[str] | None = None,
    stack: Mapping[str, Sequence[str] | Literal["features"]] | None = None,
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
    `stack={"x": ["age", "hours"]}` makes them one float32 matrix, `stack={"x": "features"}` all
    numeric features, in the order of `.names_in("x")`. `transform(batch, draw)` changes batches:
    see `data.reading.augment`. `window` is how many records are mixed at least (default:
    as many as 128 MiB hold). `transfer` says how shards get here (`data.fetching.transfer`); left
    out, they are here, or come as the [data] settings say.
    """
    return PreparedData(
        folder=folder_of(folder),
        split=split,
        columns=None if columns is None else tuple(columns),
        stack=None if stack is None else {name: _stacked(name, of) for name, of in stack.items()},
        pad=pad,
        transform=transform,
        verify=verify,
        window=window,
        transfer=transfer,
    )


def _stacked(name: str, of: Sequence[str] | str) -> tuple[str, ...]:
    if of == "features":
        return FEATURES
    if isinstance(of, str):
        raise DataError(f'stack: {name} is {of!r}; give a list of columns, or "features".')
    return tuple(of)
