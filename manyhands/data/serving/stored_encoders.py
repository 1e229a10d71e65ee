# SPDX-License-Identifier: Apache-2.0
"""What a model was trained on, kept with its run: encoders, and what a batch of them looks like.

A run keeps a copy of its prepared folder's manifest without the list of shards. So whoever has the
run folder can encode raw records exactly as training did, wherever the data is now.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa

from manyhands.data.columns.schema import MANIFEST, type_of
from manyhands.data.encoding.encoders import Encoders
from manyhands.data.encoding.fitted_encoders import (
    Classes,
    DroppedColumn,
    Fitted,
    Ranked,
    Raw,
    ScaledNumbers,
    Stacked,
)
from manyhands.data.encoding.vocabulary import KnownValue
from manyhands.data.reading.batch_columns import batch_columns, with_features_named
from manyhands.data.reading.prepared_data import PreparedData
from manyhands.data.shards.manifest import Manifest, read_manifest, write_manifest
from manyhands.data.shards.prepared_url import FolderOrUrl

SPARE = ("label", "id", "group", "time", "weight")
"""Roles of columns that say nothing to a model: a record may lack them."""


@dataclass(frozen=True)
class Serving:
    """How raw records become the batches that training saw."""

    manifest: Manifest
    data: PreparedData
    """Which columns a batch holds, stacked and padded how. Its folder is not looked at."""

    @cached_property
    def encoders(self) -> Encoders:
        return Encoders.load(self.manifest.encoders)

    @cached_property
    def used(self) -> dict[str, Fitted]:
        """The encoders whose columns a batch holds, able to read whole numbers written as 3.0."""
        stack = self.data.stack or {}
        names = {name for name, _ in batch_columns(self.manifest.schema, self.data)}
        names |= {name for of in stack.values() for name in of}
        return {
            name: _wide(fit)
            for name, fit in self.encoders.fitted.items()
            if not isinstance(fit, DroppedColumn) and {name, f"{name}_missing"} & names
        }

    @property
    def packed(self) -> dict[str, list[str]]:
        """Columns that are stacked before they are encoded, by what they become."""
        return dict(self.manifest.lineage.get("packed", {}))

    @property
    def label(self) -> str | None:
        labels = (n for n, fit in self.encoders.fitted.items() if fit.role == "label")
        return next(labels, None)

    @property
    def names_a_record(self) -> str | None:
        """The column with the role `id`."""
        return next((c.name for c in self.manifest.raw if c.role == "id"), None)

    @property
    def classes(self) -> list[KnownValue] | None:
        """The names of the classes, in the order of their numbers, where the label has any."""
        fit = self.encoders.fitted.get(self.label or "")
        return fit.values if isinstance(fit, Classes) else None

    def raw_types(self, name: str) -> dict[str, str]:
        """The raw columns of which an encoder makes its own, and the types they are read as."""
        fit = self.used[name]
        if isinstance(fit, Stacked) and name in self.packed:
            return {member: _wide(f).type for member, f in fit.members.items()}
        return {name: fit.type}


def _wide(fit: Fitted) -> Fitted:
    """Scaled whole numbers are scaled as floats: the same numbers, and 3.5 is what it is."""
    if isinstance(fit, Stacked):
        return msgspec.structs.replace(fit, type=_as_floats(fit.type))
    scaled = isinstance(fit, ScaledNumbers | Ranked)
    if scaled or (isinstance(fit, Raw) and pa.types.is_floating(type_of(fit.to))):
        return msgspec.structs.replace(fit, type=_as_floats(fit.type))
    return fit


def _as_floats(name: str) -> str:
    inner, bracket, size = name.partition("[")
    whole = not name.startswith("list<") and pa.types.is_integer(type_of(inner))
    return f"float64{bracket}{size}" if whole else name


# ---- kept with a run


def store_encoders(folder: FolderOrUrl, to: Path) -> None:
    """Keep what a prepared folder says of itself, without its shards, in a folder `to`."""
    manifest = read_manifest(folder)
    lineage = {name: manifest.lineage[name] for name in ("packed",) if name in manifest.lineage}
    kept = msgspec.structs.replace(manifest, splits={}, statistics={}, lineage=lineage, leakage={})
    to.mkdir(exist_ok=True)
    write_manifest(to, kept)


def lend_encoders(serving: Serving, to: Path) -> None:
    """A folder that `prepare --like` takes: raw records become what predicting makes of them."""
    wide = Encoders({name: _wide(fit) for name, fit in serving.encoders.fitted.items()})
    to.mkdir()
    write_manifest(to, msgspec.structs.replace(serving.manifest, encoders=wide.dump()))


def read_stored(folder: Path, data: PreparedData) -> Serving:
    """As it was kept; of runs from before that, as the prepared folder has it now."""
    where = folder if (folder / MANIFEST).exists() else data.folder
    manifest = read_manifest(where)
    return Serving(manifest, with_features_named(data, manifest.schema))


def same_encoders(manifest: Manifest, other: Manifest) -> bool:
    """Whether records encoded by one mean the same as records encoded by the other."""

    def told(of: Manifest) -> Any:
        fitted = Encoders.load(of.encoders).dump()
        spare = [role for role in SPARE if role != "label"]  # whose classes have numbers
        return {name: fit for name, fit in fitted.items() if fit.get("role") not in spare}

    return told(manifest) == told(other)
