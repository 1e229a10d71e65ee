# SPDX-License-Identifier: Apache-2.0
"""Some of a table's rows as an Arrow batch: in files, between hosts, for people."""

from typing import Any

import numpy as np
import pyarrow as pa
import torch

from manyhands.training.state.rows.row_hash import buckets_of, hashes_of
from manyhands.training.state.rows.table_part import TablePart

NOT_STATE = ("bucket", "id", "seen", "last")


def to_batch(part: TablePart) -> pa.RecordBatch:
    """Lanes are columns of lists, null where an id is no row yet."""
    columns: dict[str, Any] = {
        "bucket": pa.array(buckets_of(hashes_of(part.ids)).astype(np.int16)),
        "id": pa.array(part.ids),
        "seen": pa.array(part.counts),
    }
    if part.last is not None:
        columns["last"] = pa.array(part.last)
    rows = part.counts == 0
    for name, lane in part.lanes.items():
        width = lane.shape[1]
        whole = np.zeros((len(rows), width), np.float32)
        whole[rows] = lane.numpy()
        mask = None if rows.all() else pa.array(~rows)
        values = pa.array(whole.reshape(-1))
        columns[name] = pa.FixedSizeListArray.from_arrays(values, width, mask=mask)
    return pa.record_batch(columns)


def from_batch(batch: pa.RecordBatch) -> TablePart:
    ids, counts = (batch.column(name).to_numpy() for name in ("id", "seen"))
    rows = counts == 0
    lanes: dict[str, torch.Tensor] = {}
    for name in batch.schema.names:
        if name not in NOT_STATE:
            column = batch.column(name)
            width, first = column.type.list_size, column.offset
            whole = column.values.to_numpy().reshape(-1, width)[first : first + len(rows)]
            lanes[name] = torch.from_numpy(whole[rows])
    last = batch.column("last").to_numpy().copy() if "last" in batch.schema.names else None
    return TablePart(ids.copy(), counts.copy(), last, lanes)


def pack_part(part: TablePart) -> bytes:
    """For another host."""
    sink = pa.BufferOutputStream()
    batch = to_batch(part)
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def unpack_part(sent: bytes) -> TablePart:
    with pa.ipc.open_stream(sent) as reader:
        return from_batch(reader.read_next_batch())
