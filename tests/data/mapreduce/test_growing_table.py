"""Tables that grow in place are what Arrow's concatenation is, in one chunk."""

import random
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from manyhands.data.mapreduce.external_shuffle import gather, gather_parts, parts_for, spill
from manyhands.data.mapreduce.growing_table import GrowingTable

KINDS: list[tuple[pa.DataType, Any]] = [
    (pa.int64(), lambda draw: draw.randint(-9, 9)),
    (pa.uint8(), lambda draw: draw.randint(0, 9)),
    (pa.float32(), lambda draw: float(draw.randint(0, 9))),
    (pa.bool_(), lambda draw: draw.random() < 0.5),
    (pa.string(), lambda draw: "é" * draw.randint(0, 3)),
    (pa.binary(), lambda draw: b"x" * draw.randint(0, 3)),
    (pa.list_(pa.int32()), lambda draw: [draw.randint(0, 9) for _ in range(draw.randint(0, 4))]),
    (pa.list_(pa.float32(), 3), lambda draw: [1.0, 2.0, float(draw.randint(0, 9))]),
]


def some_table(draw: random.Random, rows: int, missing: float) -> pa.Table:
    def values(make: Any) -> list[Any]:
        return [None if draw.random() < missing else make(draw) for _ in range(rows)]

    return pa.table({str(i): pa.array(values(m), kind) for i, (kind, m) in enumerate(KINDS)})


@pytest.mark.parametrize("missing", [0.0, 0.2])
@pytest.mark.parametrize("seed", range(10))
def test_parts_become_one_table(seed: int, missing: float) -> None:
    draw = random.Random(seed)
    sizes = [draw.randint(0, 6) for _ in range(5)]
    parts = [some_table(draw, n, missing).slice(draw.randint(0, 2)) for n in sizes]
    growing = GrowingTable()
    for part in parts:
        growing.add(part)
    found = growing.table()
    found.validate(full=True)
    assert found.to_pylist() == pa.concat_tables(parts).to_pylist()
    if not missing:
        assert all(found.column(str(i)).num_chunks == 1 for i in (0, 1, 2, 4, 5, 6, 7))


def test_a_bucket_in_parts_is_the_bucket(tmp_path: Path) -> None:
    keys = np.random.default_rng(0).permutation(1 << 12).astype(np.uint64) << np.uint64(52)
    table, splits = pa.table({"x": pa.array(keys)}), np.zeros(len(keys), np.int8)
    spill(tmp_path / "whole", table, splits, keys, [3])
    spill(tmp_path / "parts", table, splits, keys, [3 * 4])
    for bucket in range(3):
        found = gather_parts([tmp_path / "parts"], 0, bucket, 4)
        assert found.equals(gather([tmp_path / "whole"], 0, bucket))


def test_growing_takes_no_second_copy() -> None:
    """A shard of 64 MiB is gathered within `--memory 256MB`, with all that a process needs."""
    part = pa.table({"x": np.zeros(1 << 20), "y": [[1, 2]] * (1 << 20)})
    before = pa.total_allocated_bytes()
    tracemalloc.start()
    growing = GrowingTable()
    for _ in range(8):
        growing.add(part)
    table = growing.table()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak + pa.total_allocated_bytes() - before < 1.5 * table.nbytes


def test_there_are_never_too_many_groups_in_a_file() -> None:
    assert parts_for(4, 64 << 20) == 8
    assert parts_for(1 << 14, 64 << 20) == 1
    assert parts_for(1, 1 << 20) == 1
