# SPDX-License-Identifier: Apache-2.0
"""Questions about a saved run: its scores, its fingerprint. Answered here, or by Ray."""

import warnings
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from manyhands.checkpoint.commit import FolderStorage
from manyhands.checkpoint.step_files import fingerprint_step, no_average, weights_file
from manyhands.data.open_data import open_task
from manyhands.driver.task_files import reload
from manyhands.evaluation import scores
from manyhands.stories.load import committed
from manyhands.values.config import RunConfig, read_toml
from manyhands.values.errors import RequestError, RunDirError
from manyhands.values.loaded_task import Loaded
from manyhands.values.option_fields import taking
from manyhands.values.run_folder import RunDir, open_run
from manyhands.values.run_options import EvaluateRequest
from manyhands.values.scratch_folder import Scratch, sweep
from manyhands.values.task import Task
from manyhands.values.world import World
from manyhands.worker.scoring import evaluation_of, measured, score_portably

LEVEL = 4
"""From a warning here to the line that called `mh.evaluate`."""


@taking(EvaluateRequest)
def evaluate(request: EvaluateRequest) -> dict[str, float]:
    """Scores of a saved step (the newest one) on the held-out records, as the run does.

    `data` are others to be scored on: a prepared folder, raw files or records (with a label; they
    go through the run's encoders), or what the task itself could have for its data. They are
    computed here, or by tasks of Ray ("ray", "ray://HOST:PORT"): the same numbers.
    """
    return evaluate_request(request)


def evaluate_request(request: EvaluateRequest) -> dict[str, float]:
    folder = open_run(Path(request.run))
    chosen = committed(folder, request.step)
    config, _ = read_toml(folder.config)
    if request.weights is not None:
        _kept(folder, chosen, request.weights)
        config = config.with_settings([f"evaluate.weights={request.weights}"])
    if request.engine == "local":
        score_portably(config, LEVEL + 1)  # before the task's own code has computed something
    given = None if isinstance(request.data, list | tuple) and not request.data else request.data
    others = given is not None or request.split is not None
    loaded, notes = reload(folder, request.task, config, with_data=not others)
    for note in notes:
        warnings.warn(note, stacklevel=LEVEL)
    if not others:
        return _scored(request, folder.step(chosen), loaded, config)
    sweep()
    with closing(Scratch("evaluate")) as scratch:
        task = _on_others(request, given, folder, loaded.task, config, scratch.path)
        if given is not None:
            config = replace(config, data=replace(config.data, fold=None))
        return _scored(request, folder.step(chosen), replace(loaded, task=task), config)


def _on_others(
    request: EvaluateRequest,
    given: Any,
    folder: RunDir,
    task: Task,
    config: RunConfig,
    scratch: Path,
) -> Task:
    """The task, with these records held out."""
    # Arrow is not needed by others.
    from manyhands.stories.predicted_data import encoded_copy, is_raw, own_records, serving_of

    serving = serving_of(folder, task, config)
    if given is None or not is_raw(given, serving):
        return own_records(given, request.split, task, config, serving).task
    if "://" in request.engine:
        raise RequestError(
            "nodes of a Ray cluster do not see what is encoded here: prepare these files with "
            "--like, in a folder that all of them see, and give that."
        )
    assert serving is not None
    copy, notes = encoded_copy(given, serving, scratch, on_error=request.on_error)
    for note in notes:
        warnings.warn(note, stacklevel=LEVEL + 1)
    return own_records(copy, None, task, config, None).task


def _scored(
    request: EvaluateRequest, where: Path, loaded: Loaded, config: RunConfig
) -> dict[str, float]:
    _, held_out = open_task(loaded.task, config)
    if held_out is None:
        raise RunDirError(f"the task of {request.run} has no held-out records to evaluate on.")
    if request.engine == "local":
        if request.worker_resources or request.ray_token_file:
            raise RequestError("--worker-resources and --ray-token-file are for Ray: --engine ray")
        results = measured(loaded.task, config, where, World(0, 1))
    else:
        from manyhands.stories.evaluate_on_ray import measured_on_ray

        results = measured_on_ray(loaded, config, where, request.engine, request)
    return scores.combine(evaluation_of(loaded.task, config), results)


def fingerprint(run: str | Path, *, step: int | None = None, weights: str = "trained") -> str:
    """SHA-256 over names, shapes, dtypes and bytes of a saved step's weights and buffers (and over
    ids and weights of the rows of its tables).

    `weights`: the trained ones, or an average of them that the run kept ("ema", "swa").
    """
    folder = open_run(Path(run))
    chosen = committed(folder, step)
    FolderStorage(folder).get(chosen, _kept(folder, chosen, weights))  # which must be sound
    return fingerprint_step(folder.step(chosen), weights)


def _kept(run: RunDir, step: int, weights: str) -> str:
    """The file with these weights, which must be one of the step's."""
    file = weights_file(weights)
    if file not in FolderStorage(run).manifest(step).files:
        raise RunDirError(no_average(run.step(step), weights))
    return file
