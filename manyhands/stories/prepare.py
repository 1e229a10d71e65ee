# SPDX-License-Identifier: Apache-2.0
"""Preparing data on an engine: processes of this host, or a Ray cluster. The bytes are the same."""

import os
from collections.abc import Iterable
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from manyhands.data.preparing import pipeline
from manyhands.data.shards.manifest import Manifest
from manyhands.values.errors import RequestError


def prepare(
    sources: str | Path | Iterable[Any],
    to: str | Path,
    *,
    engine: str = "local",
    worker_resources: str | None = None,
    ray_token_file: str | Path | None = None,
    executor: Executor | None = None,
    **settings: Any,
) -> Manifest:
    """Turn raw records into a data set in the folder `to`; what it holds.

    `sources`: paths, globs, folders, URLs, or an iterable of records (dicts). `engine` is "local",
    "ray" or "ray://HOST:PORT" (all its nodes must see the files and the folder); an `executor` of
    your own goes instead. The settings are those of `manyhands prepare`, which docs/data.md
    explains: label, split, folds, encode, seed, format, workers, memory, ...
    """
    from manyhands.launch.ray.ray_session import is_ray

    if not is_ray(engine):
        if engine != "local" or worker_resources or ray_token_file:
            raise RequestError(f"--engine {engine}: prepare runs on local processes, or on ray.")
        return pipeline.prepare(sources, to, executor=executor, **settings)
    from manyhands.launch.ray.ray_executor import open_executor

    token = Path(ray_token_file) if ray_token_file else None
    with open_executor(engine, worker_resources, token) as ray:
        _refuse_blind_nodes(ray, Path(to))
        settings["workers"] = settings.get("workers") or ray.workers
        try:
            return pipeline.prepare(sources, to, executor=ray, **settings)
        except BaseException:
            ray.shutdown(cancel_futures=True)
            raise


def _refuse_blind_nodes(ray: Any, to: Path) -> None:
    """Better said now than after an hour."""
    to.parent.mkdir(parents=True, exist_ok=True)
    marker = to.parent / f".{to.name}-{os.getpid()}"
    marker.touch()
    try:
        blind = ray.blind_to(marker)
    finally:
        marker.unlink()
    if blind:
        raise RequestError(
            f"Ray's nodes {', '.join(blind)} do not see {to.parent.absolute()}: preparing on "
            "several nodes needs a folder that all of them share."
        )
