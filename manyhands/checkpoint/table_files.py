# SPDX-License-Identifier: Apache-2.0
"""Files with the rows of tables (`mh.Embedding`), in Arrow's stream format, one for each worker
that had some of them:

    table-user-00.arrows    columns: bucket, id, seen, (last,) weights, and the optimizer's state

A bucket is wholly in one file and in one batch of it, its ids in ascending order; so rows are the
same, byte by byte, however many workers wrote them, if each bucket is. `seen` is 0 for a row; else
it is how often an id was seen that is not admitted yet, and has no weights.
"""

import hashlib
import io
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from manyhands.values.errors import CheckpointDamaged

_NAME = re.compile(r"table-(?P<table>.+)-\d+\.arrows")


def table_file(table: str, worker: int) -> str:
    return f"table-{table}-{worker:02d}.arrows"


def tables_in(folder: Path) -> list[str]:
    """Names of the tables of a step."""
    found = (_NAME.fullmatch(path.name) for path in folder.glob("table-*.arrows"))
    return sorted({match["table"] for match in found if match})


def encode_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[bytes]:
    """The bytes of a file; at least one batch is needed."""
    sink, writer = io.BytesIO(), None
    for batch in batches:
        if writer is None:
            writer = pa.ipc.new_stream(sink, batch.schema)
        writer.write_batch(batch)
        yield _emptied(sink)
    if writer is not None:
        writer.close()
        yield _emptied(sink)


def _emptied(sink: io.BytesIO) -> bytes:
    content = sink.getvalue()
    sink.seek(0)
    sink.truncate()
    return content


def read_batches(folder: Path, table: str) -> Iterator[pa.RecordBatch]:
    """All rows of a table, wherever they lie; nothing is read before it is needed."""
    for path in sorted(folder.glob("table-*.arrows")):
        match = _NAME.fullmatch(path.name)
        if match is None or match["table"] != table:
            continue
        try:
            with pa.memory_map(str(path)) as file, pa.ipc.open_stream(file) as reader:
                yield from reader
        except (OSError, pa.ArrowInvalid) as error:
            raise CheckpointDamaged(f"{path} is not a readable Arrow file: {error}") from error


def fingerprint_tables(folder: Path) -> str | None:
    """SHA-256 over names, ids and weights of all rows of a step; None: it has no tables."""
    whole, names = hashlib.sha256(), tables_in(folder)
    for name in names:
        whole.update(f"{name}\n".encode())
        of_buckets: dict[int, bytes] = {}
        for batch in read_batches(folder, name):
            of_buckets |= _bucket_digests(batch)
        for bucket, digest in sorted(of_buckets.items()):
            whole.update(bucket.to_bytes(2, "little") + digest)
    return whole.hexdigest() if names else None


def _bucket_digests(batch: pa.RecordBatch) -> dict[int, bytes]:
    seen, buckets = (batch.column(name).to_numpy() for name in ("seen", "bucket"))
    rows = np.flatnonzero(seen == 0)
    if not len(rows):
        return {}
    buckets, ids = buckets[rows], batch.column("id").to_numpy()[rows]
    weights = batch.column("weights")
    dim = weights.type.list_size
    values = weights.values.to_numpy().reshape(-1, dim)[weights.offset :][rows]
    found: dict[int, bytes] = {}
    starts = np.flatnonzero(np.diff(buckets, prepend=-1))
    for start, stop in zip(starts, [*starts[1:], len(rows)], strict=True):
        digest = hashlib.sha256(ids[start:stop].tobytes())
        digest.update(np.ascontiguousarray(values[start:stop]).data)
        found[int(buckets[start])] = digest.digest()
    return found
