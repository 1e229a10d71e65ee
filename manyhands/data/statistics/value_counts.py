# SPDX-License-Identifier: Apache-2.0
"""How often each distinct value was seen, as Arrow arrays: a million cost tens of megabytes.

Counts are exact up to a limit of distinct values (and of bytes). Beyond it the rarest are forgotten
and the counts are marked `capped`: frequent values stay exact in practice, and what is kept depends
on nothing but the parts and their order.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import ipc

from manyhands.data.columns.arrays import compute, whole

LIMIT = 1_000_000
FLOAT_LIMIT = 10_000
BYTES_LIMIT = 64 << 20

_CAPPED = b"capped"


@dataclass(frozen=True, slots=True)
class ValueCounts:
    values: pa.Array
    """Distinct, without nulls; in a total the most frequent first, among equals the smallest."""
    counts: NDArray[np.int64]
    capped: bool = False

    def __len__(self) -> int:
        return len(self.values)

    def dump(self) -> bytes:
        sink = pa.BufferOutputStream()
        table = pa.table({"value": self.values, "count": self.counts})
        table = table.replace_schema_metadata({_CAPPED: b"1"} if self.capped else None)
        with ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        return sink.getvalue().to_pybytes()

    @staticmethod
    def load(data: bytes) -> "ValueCounts":
        table = ipc.open_stream(data).read_all()
        counts = table.column("count").to_numpy()
        return ValueCounts(whole(table.column("value")), counts, bool(table.schema.metadata))


def count(values: pa.Array) -> ValueCounts:
    """Of an array; nulls are left out. Floats must not hold NaN."""
    found = values.drop_null().value_counts()
    return _ranked(found.field("values"), found.field("counts").to_numpy(), False, exact=False)


class ValueTally:
    """Counts that are added up."""

    def __init__(self) -> None:
        self._held: list[ValueCounts] = []

    def add(self, part: ValueCounts) -> None:
        self._held.append(part)
        # Joined whenever what is new outgrows what is known: every value is moved few times.
        if sum(map(len, self._held[1:])) > max(len(self._held[0]), LIMIT // 10):
            self._held = [_joined(self._held, exact=False)]

    def total(self) -> ValueCounts | None:
        """None when nothing was added."""
        return _joined(self._held, exact=True) if self._held else None


def _joined(parts: list[ValueCounts], exact: bool) -> ValueCounts:
    values = pa.concat_arrays([p.values for p in parts])
    counts = np.concatenate([p.counts for p in parts])
    table = pa.table({"value": values, "count": counts})
    sums = table.group_by("value", use_threads=False).aggregate([("count", "sum")])
    capped = any(p.capped for p in parts)
    return _ranked(
        whole(sums.column("value")), sums.column("count_sum").to_numpy(), capped, exact=exact
    )


def _ranked(
    values: pa.Array, counts: NDArray[np.int64], capped: bool, *, exact: bool
) -> ValueCounts:
    """In order, cut to the limit; on the way only what has twice outgrown the limit."""
    table = pa.table({"value": values, "count": counts})
    limit = FLOAT_LIMIT if pa.types.is_floating(values.type) else LIMIT
    if table.nbytes > BYTES_LIMIT:
        limit = min(limit, max(1, len(values) * BYTES_LIMIT // table.nbytes))
    if not exact and len(values) <= 2 * limit:
        return ValueCounts(values, counts, capped)
    keys = [("count", "descending"), ("value", "ascending")]
    ranks = compute.sort_indices(table, sort_keys=keys)
    table = table.take(ranks[:limit])
    return ValueCounts(
        whole(table.column("value")),
        table.column("count").to_numpy(),
        capped or len(values) > limit,
    )
