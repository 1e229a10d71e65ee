# SPDX-License-Identifier: Apache-2.0
"""Preparing data on an engine: processes of this host, or a Ray cluster. The bytes are the same."""

import os
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from manyhands.data.preparing import pipeline
from manyhands.data.shards.manifest import Manifest
from manyhands.values.errors import RequestError
from manyhands.values.local_folders import local_folder
from manyhands.values.option_fields import taking
from manyhands.values.prepare_options import PrepareRequest


@dataclass(frozen=True, kw_only=True)
class PrepareCall(PrepareRequest):
    """A call of `mh.prepare`."""

    executor: Executor | None = None
    """One of your own, in place of our processes."""


@taking(PrepareCall)
def prepare(call: PrepareCall) -> Manifest:
    """Turn raw records into a data set in the folder `to`; what it holds.

    `sources`: paths, globs, folders, URLs, or an iterable of records (dicts). `engine` is "local",
    "ray" or "ray://HOST:PORT" (all its nodes must see the files and the folder); an `executor` of
    your own goes instead. The settings are those of `manyhands prepare`, which docs/data.md
    explains: label, split, folds, encode, seed, format, workers, memory, ...
    """
    return prepare_request(call, call.executor)


def prepare_request(request: PrepareRequest, executor: Executor | None = None) -> Manifest:
    from manyhands.launch.ray.ray_session import is_ray

    engine = request.engine
    if not is_ray(engine):
        if engine != "local" or request.worker_resources or request.ray_token_file:
            raise RequestError(f"--engine {engine}: prepare runs on local processes, or on ray.")
        return pipeline.prepare(request, executor)
    from manyhands.launch.ray.ray_executor import open_executor

    with open_executor(engine, request.worker_resources, request.ray_token) as ray:
        _refuse_blind_nodes(ray, local_folder(request.to, "prepared data"))
        try:
            return pipeline.prepare(replace(request, workers=request.workers or ray.workers), ray)
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
