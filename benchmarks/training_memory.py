# SPDX-License-Identifier: Apache-2.0
"""Peak memory of training from shards, by the size of the data: flat is wanted.

    python benchmarks/training_memory.py [--sizes 1GB,4GB,16GB] [--workers 2] [--folder /scratch]

For each size prepared data is written (records of 4 KB in shards of 64 MiB), a small model is
trained on all of it once, with the usual window of 128 MiB, and every process is watched: memory
that is its own (private and changed: pages of the mapped shards, which can be dropped at any time,
are not in it), and its resident set, in which they are. The data is removed afterwards.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
from rows import console

from manyhands.data.columns.schema import ID, Column
from manyhands.data.shards.manifest import VERSION, Manifest, SplitInfo, write_manifest
from manyhands.data.shards.shard_formats import write_arrow
from manyhands.values.byte_sizes import parse_bytes

WIDTH = 1024
SHARD_BYTES = 64 << 20
ROWS = SHARD_BYTES // (4 * WIDTH)
BATCH, MICRO_BATCH = 2048, 512

TASK = f"""
import torch
from torch import nn
from torch.nn import functional as F

import manyhands as mh

task = mh.Task(
    model=lambda: nn.Linear({WIDTH}, 2),
    loss=lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"]),
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-3),
    data="data",
)
"""


def write_data(folder: Path, size: int) -> int:
    """Shards with numbers of their own; how many records."""
    folder.mkdir()
    draw = np.random.default_rng(0)
    block = draw.standard_normal((ROWS, WIDTH), np.float32).ravel()
    labels = draw.integers(0, 2, ROWS)
    shards = []
    for number in range(max(1, round(size / SHARD_BYTES))):
        columns = {
            ID: pa.array(np.arange(number * ROWS, (number + 1) * ROWS)),
            "x": pa.FixedSizeListArray.from_arrays(pa.array(np.roll(block, number)), WIDTH),
            "y": pa.array(labels),
        }
        shards.append(write_arrow(folder / f"train-{number:05}.arrow", pa.table(columns)))
    schema = (
        Column(ID, "int64", "id"),
        Column("x", f"float32[{WIDTH}]"),
        Column("y", "int64", "label"),
    )
    split = SplitInfo(sum(s.rows for s in shards), sum(s.nbytes for s in shards), shards)
    write_manifest(folder, Manifest(VERSION, "arrow", 0, schema, {"train": split}))
    return split.rows


def sizes_of(pid: int) -> tuple[int, int]:
    """(private and changed, resident) bytes of a process."""
    fields: dict[str, int] = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, value = line.split(":")
        fields[name] = int(value.split()[0]) * 1024
    return fields["Private_Dirty"], fields["Rss"]


def watch(process: subprocess.Popen[bytes]) -> dict[str, tuple[int, int]]:
    """Who → the largest sizes of any such process."""
    peaks: dict[str, tuple[int, int]] = {}
    while process.poll() is None:
        try:
            driver = psutil.Process(process.pid)
            for one in [driver, *driver.children(recursive=True)]:
                parent = one.ppid()
                who = "driver" if one.pid == process.pid else "agent"
                who = who if process.pid in (one.pid, parent) else "worker"
                own, resident = sizes_of(one.pid)
                before = peaks.get(who, (0, 0))
                peaks[who] = max(before[0], own), max(before[1], resident)
        except (psutil.Error, OSError, KeyError):
            pass
        time.sleep(0.2)
    return peaks


def train(folder: Path, workers: str) -> tuple[dict[str, tuple[int, int]], float]:
    (folder / "task.py").write_text(TASK)
    command = [sys.executable, "-m", "manyhands", "train", "task.py", "--to", "run", "-q"]
    command += ["--workers", workers, "--set", "train.epochs=1"]
    command += ["--set", f"train.batch={BATCH}", "--set", f"train.micro_batch={MICRO_BATCH}"]
    began = time.monotonic()
    process = subprocess.Popen(command, cwd=folder)
    peaks = watch(process)
    if process.returncode != 0:
        raise SystemExit(f"training ended with {process.returncode}")
    return peaks, time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default="1GB,4GB,16GB")
    parser.add_argument("--workers", default="2")
    parser.add_argument("--folder", default=None, help="where there is room for the largest")
    asked = parser.parse_args()
    for size in asked.sizes.split(","):
        with tempfile.TemporaryDirectory(prefix="manyhands-bench-", dir=asked.folder) as name:
            folder = Path(name)
            records = write_data(folder / "data", parse_bytes(size))
            peaks, took = train(folder, asked.workers)
        told = ", ".join(
            f"{who} {own / 1e6:,.0f} MB of its own ({resident / 1e6:,.0f} resident)"
            for who, (own, resident) in sorted(peaks.items())
        )
        console.print(f"{size}, {records:,} records, {took:.0f} s: {told}")


if __name__ == "__main__":
    main()
