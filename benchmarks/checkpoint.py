# SPDX-License-Identifier: Apache-2.0
"""Saving a checkpoint: for how long does training stand still? In seconds per 400 MB.

    python benchmarks/checkpoint.py [--quick] [--rounds 6] [--to FOLDER] [--json FILE]

    torch-save        torch.save: training waits until it is written
    dcp-async         torch.distributed.checkpoint.async_save as it comes
    dcp-async-cached  the same with a stager that keeps its copies from save to save
    manyhands         our Saver and Folder: copies kept, written by a thread, hashed and synced

Each has a process of its own. They take turns, and a save is written before the next contestant's
begins; only the time until training could go on is counted. The first save also has to find memory
for its copies, so it stands apart. Ratios are to the faster of the two dcp contestants. All of them
together want eight times the size in memory.
"""

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path

import rows
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rows import Metric, Wanted, console
from torch import Tensor
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from manyhands.checkpoint.commit import FileRecord, FolderStorage, StepManifest
from manyhands.checkpoint.saver import Content, Saver
from manyhands.values.run_folder import RunDir

FULL_MB, QUICK_MB = 400, 100
METRICS = (Metric("blocking_s", "blocking s per 400 MB", digits=3),)
FIRST, LATER = "first save", "later saves"
TARGETS = {(LATER, "blocking_s"): Wanted("≤", 0.06, of_ratio=False)}

Wait = Callable[[], object]
Save = Callable[[int], Wait]
"""save(step) returns when training could go on; what it returns waits until all is written."""


def torch_save(tensors: dict[str, Tensor], to: Path) -> Save:
    to.mkdir()

    def save(step: int) -> Wait:
        torch.save(tensors, to / "saved.pt")
        return lambda: None

    return save


def dcp_async(tensors: dict[str, Tensor], to: Path) -> Save:
    def save(step: int) -> Wait:
        return dcp.async_save(tensors, checkpoint_id=to / str(step)).result

    return save


def dcp_async_cached(tensors: dict[str, Tensor], to: Path) -> Save:
    # What async_save would make anew for every save; the other options want a GPU.
    plain = StagingOptions(
        use_pinned_memory=False,
        use_shared_memory=False,
        use_async_staging=False,
        use_non_blocking_copy=False,
    )
    stager = DefaultStager(plain)

    def save(step: int) -> Wait:
        return dcp.async_save(tensors, checkpoint_id=to / str(step), async_stager=stager).result

    return save


def manyhands(tensors: dict[str, Tensor], to: Path) -> Save:
    storage = FolderStorage(RunDir(to).create())

    def written(step: int, files: dict[str, FileRecord], blocked_s: float) -> None:
        storage.commit(StepManifest(step, files))

    saver = Saver(storage, written)

    def save(step: int) -> Wait:
        saver.save(step, [Content("model.safetensors", tensors, {})])
        return saver.drain

    return save


CONTESTANTS = {
    "torch-save": torch_save,
    "dcp-async": dcp_async,
    "dcp-async-cached": dcp_async_cached,
    "manyhands": manyhands,
}


def reference(metric: str, values: Mapping[str, float]) -> float | None:
    return min(values["dcp-async"], values["dcp-async-cached"])


def contestant(name: str, to: Path, size_mb: int, line: Connection) -> None:
    """A process of its own: answers a step's number with the seconds its save stood in the way."""
    torch.set_num_threads(1)  # as in a worker
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    count = size_mb // 4
    save = CONTESTANTS[name](
        {f"layer.{k}.weight": torch.randn(1000, 1000) for k in range(count)}, to
    )
    while True:
        try:
            step = line.recv()
        except EOFError:  # the benchmark is over, or was killed
            os._exit(0)
        started = time.perf_counter()
        wait = save(step)
        blocked_s = time.perf_counter() - started
        wait()
        for written in [path for path in to.rglob("*") if path.is_file()]:
            written.unlink()
        line.send(blocked_s)


def measure(under: Path, size_mb: int, rounds: int) -> rows.Samples:
    spawn = multiprocessing.get_context("spawn")
    lines: dict[str, Connection] = {}
    for name in CONTESTANTS:
        lines[name], theirs = spawn.Pipe()
        arguments = (name, under / name, size_mb, theirs)
        spawn.Process(target=contestant, args=arguments, daemon=True).start()
        theirs.close()
    samples: rows.Samples = {}
    for step in range(rounds):
        for name, line in lines.items():
            line.send(step)
            blocked_s = line.recv() * FULL_MB / size_mb
            samples.setdefault((LATER if step else FIRST, name, "blocking_s"), []).append(blocked_s)
            console.print(f"save {step + 1}  {name:<17} {blocked_s:.3f} s per {FULL_MB} MB")
    return samples


def main() -> None:
    parser = rows.arguments(__doc__, rounds=6, quick_rounds=3)
    parser.add_argument("--to", type=Path, help="a folder on the disk to try")
    asked = parser.parse_args()
    size_mb = QUICK_MB if asked.quick else FULL_MB
    with tempfile.TemporaryDirectory(dir=asked.to) as scratch:
        samples = measure(Path(scratch), size_mb, rows.rounds_of(asked))
    rows.report(rows.summarise(samples, reference), METRICS, TARGETS, asked.json)


if __name__ == "__main__":
    main()
