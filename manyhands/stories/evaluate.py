# SPDX-License-Identifier: Apache-2.0
"""Questions about a saved run: its scores, its fingerprint. Answered here, or by Ray."""

import warnings
from pathlib import Path

from manyhands.checkpoint.commit import FolderStorage
from manyhands.checkpoint.safetensors_files import fingerprint as fingerprint_of
from manyhands.checkpoint.step_files import no_average, weights_file
from manyhands.data.open_data import open_task
from manyhands.driver.task_files import reload
from manyhands.evaluation import scores
from manyhands.stories.load import committed
from manyhands.values.config import read_toml
from manyhands.values.errors import RequestError, RunDirError
from manyhands.values.option_fields import taking
from manyhands.values.run_folder import RunDir, open_run
from manyhands.values.run_options import EvaluateRequest
from manyhands.values.world import World
from manyhands.worker.scoring import evaluation_of, measured, score_portably

LEVEL = 4
"""From a warning here to the line that called `mh.evaluate`."""


@taking(EvaluateRequest)
def evaluate(request: EvaluateRequest) -> dict[str, float]:
    """Scores of a saved step (the newest one) on the held-out records, as the run does.

    They are computed here, or by tasks of Ray ("ray", "ray://HOST:PORT"): the same numbers.
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
    loaded, notes = reload(folder, request.task, config)
    for note in notes:
        warnings.warn(note, stacklevel=LEVEL)
    _, held_out = open_task(loaded.task, config)
    if held_out is None:
        raise RunDirError(f"the task of {folder.root} has no held-out records to evaluate on.")
    where = folder.step(chosen)
    if request.engine == "local":
        if request.worker_resources or request.ray_token_file:
            raise RequestError("--worker-resources and --ray-token-file are for Ray: --engine ray")
        results = measured(loaded.task, config, where, World(0, 1))
    else:
        from manyhands.stories.evaluate_on_ray import measured_on_ray

        results = measured_on_ray(loaded, config, where, request.engine, request)
    return scores.combine(evaluation_of(loaded.task, config), results)


def fingerprint(run: str | Path, *, step: int | None = None, weights: str = "trained") -> str:
    """SHA-256 over names, shapes, dtypes and bytes of a saved step's weights and buffers.

    `weights`: the trained ones, or an average of them that the run kept ("ema", "swa").
    """
    folder = open_run(Path(run))
    chosen = committed(folder, step)
    return fingerprint_of(FolderStorage(folder).get(chosen, _kept(folder, chosen, weights)))


def _kept(run: RunDir, step: int, weights: str) -> str:
    """The file with these weights, which must be one of the step's."""
    file = weights_file(weights)
    if file not in FolderStorage(run).manifest(step).files:
        raise RunDirError(no_average(run.step(step), weights))
    return file
