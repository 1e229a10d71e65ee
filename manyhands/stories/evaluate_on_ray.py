# SPDX-License-Identifier: Apache-2.0
"""Held-out records scored by tasks of Ray: the task and the weights travel, the results come back.

Nodes need not see the run's folder (but the data, where the task names it by its path). Parts are
those of as many ranks, and are put together as a run does it.
"""

import os
import tempfile
from pathlib import Path

import msgspec

from manyhands.checkpoint.step_files import STATE, weights_file
from manyhands.evaluation import scores
from manyhands.launch.ray.ray_executor import open_executor
from manyhands.launch.shipping import ship_task
from manyhands.values.config import RunConfig
from manyhands.values.loaded_task import Loaded
from manyhands.values.run_options import RayAccess
from manyhands.values.world import World
from manyhands.worker.scoring import measured, score_portably


class EvaluationParcel(msgspec.Struct, frozen=True):
    """What every task needs."""

    config: RunConfig
    parcel: ship_task.Parcel
    memory: bytes
    """What the parcel speaks of."""
    files: dict[str, bytes]
    """Of the saved step."""


def measured_on_ray(
    loaded: Loaded,
    config: RunConfig,
    folder: Path,
    engine: str,
    access: RayAccess,
) -> list[scores.BatchResult]:
    resources = access.worker_resources or f"CPU={config.train.threads}"
    with open_executor(engine, resources, access.ray_token) as ray:
        everything = ray.put(msgspec.msgpack.encode(_packed(loaded, config, folder)))
        parts = [ray.submit(_part, everything, rank, ray.workers) for rank in range(ray.workers)]
        return scores.decode([part.result() for part in parts])


def _packed(loaded: Loaded, config: RunConfig, folder: Path) -> EvaluationParcel:
    fd = os.memfd_create("manyhands-task")
    try:
        parcel = ship_task.pack(loaded, fd, many=True)
        memory = Path(f"/proc/self/fd/{fd}").read_bytes()
    finally:
        os.close(fd)
    tables = [path.name for path in folder.glob("table-*.arrows")]
    files = (weights_file(config.scored_weights), STATE, *tables)
    return EvaluationParcel(config, parcel, memory, {n: (folder / n).read_bytes() for n in files})


def _part(everything: bytes, rank: int, ranks: int) -> bytes:
    """On a node."""
    parts = msgspec.msgpack.decode(everything, type=EvaluationParcel)
    score_portably(parts.config, 2)
    fd = os.memfd_create("manyhands-task")
    try:
        Path(f"/proc/self/fd/{fd}").write_bytes(parts.memory)
        task = ship_task.unpack(parts.parcel, fd)
    finally:
        os.close(fd)
    with tempfile.TemporaryDirectory(prefix="manyhands-") as folder:
        for name, data in parts.files.items():
            Path(folder, name).write_bytes(data)
        results = measured(task, parts.config, Path(folder), World(rank, ranks))
    return scores.encode(results)
