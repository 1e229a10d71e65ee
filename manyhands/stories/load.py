# SPDX-License-Identifier: Apache-2.0
"""Taking a run's model and its report away: what a notebook begins with."""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from torch.nn import Module

from manyhands.checkpoint.commit import FolderStorage, newest_sound, problem_of
from manyhands.driver.task_files import reload
from manyhands.values.config import read_toml
from manyhands.values.errors import CheckpointDamaged, DataError, RunDirError
from manyhands.values.report import Report
from manyhands.values.run_folder import RunDir, open_run
from manyhands.values.task import Task
from manyhands.worker.trained_model import TRAINED, trained_model

if TYPE_CHECKING:
    from manyhands.data.serving.run_encoders import RunEncoders


def load(
    run: str | Path,
    task: Task | None = None,
    *,
    step: int | None = None,
    weights: str = TRAINED,
) -> Module:
    """The model of a run, with the weights of a saved step (the newest one), in eval mode.

    `weights` are those that were "trained", or an average of them that was saved beside ("ema",
    "swa"). A run whose task was made in Python needs that task again. `mh.encoders(run)` makes of
    raw records what the model takes.
    """
    folder = open_run(Path(run))
    chosen = committed(folder, step)
    config, _ = read_toml(folder.config)
    loaded, notes = reload(folder, task, config, with_data=False)
    for note in notes:
        warnings.warn(note, stacklevel=2)
    return trained_model(loaded.task, folder.step(chosen), config.train.seed, weights)


def encoders(run: str | Path, task: Task | None = None) -> "RunEncoders":
    """What makes of raw records the batch that a run's model takes, as in training:
    `model(mh.encoders(run)(records))`. Only of runs whose data was prepared."""
    # Arrow is not needed by others.
    from manyhands.data.serving.run_encoders import RunEncoders
    from manyhands.stories.predicted_data import serving_of

    folder = open_run(Path(run))
    config, _ = read_toml(folder.config)
    loaded, _ = reload(folder, task, config, with_data=False)
    serving = serving_of(folder, loaded.task, config)
    if serving is None:
        raise DataError(f"the data of {folder.root} was not prepared, so it has no encoders.")
    return RunEncoders(serving)


def report(run: str | Path, task: Task | None = None) -> Report:
    """What a run came to, from its folder."""
    folder = open_run(Path(run))
    try:
        found = msgspec.json.decode(folder.report.read_bytes(), type=Report)
    except FileNotFoundError:
        raise RunDirError(
            f"{folder.root} has no report: it has not finished. See how it is doing with: "
            f"manyhands status {folder.root}"
        ) from None
    except (OSError, msgspec.MsgspecError) as error:
        raise RunDirError(f"{folder.report} cannot be read: {error}") from error
    # The folder may have been moved since.
    return loadable(msgspec.structs.replace(found, run=str(folder.root)), task)


def loadable(found: Report, task: Task | None) -> Report:
    """A report that knows how its model is loaded."""

    def load_it(*, step: int | None, weights: str) -> Module:
        return load(found.run, task, step=found.step if step is None else step, weights=weights)

    return found.loaded_by(load_it)


def committed(run: RunDir, step: int | None) -> int:
    """The step asked for, or the newest one; never another one than that."""
    storage = FolderStorage(run)
    if step is None:
        try:
            newest = newest_sound(storage)
        except CheckpointDamaged as error:
            raise CheckpointDamaged(f"{error} To look at an earlier one, give --step.") from None
        if newest is None:
            raise RunDirError(f"{run.root} holds no checkpoint yet.")
        return newest
    if step not in (steps := storage.steps()):
        there = ", ".join(str(s) for s in steps) or "none"
        raise RunDirError(f"{run.root} has no saved step {step}; saved are: {there}.")
    if (problem := problem_of(storage, step)) is not None:
        raise CheckpointDamaged(problem)
    return step
