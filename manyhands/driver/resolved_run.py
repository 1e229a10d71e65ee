# SPDX-License-Identifier: Apache-2.0
"""From what was asked for to what is to be done: task found, config settled, folder named.

What was asked for is a request (values/run_options.py); whatever is alive comes beside it.
"""

import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from manyhands.checkpoint.commit import FolderStorage, newest_good
from manyhands.data.reading.loader_settings import LoaderSettings, loader_settings
from manyhands.driver.task_files import (
    load,
    name_of,
    refuse_changes,
    refuse_other,
    reload,
    warning_notes,
)
from manyhands.launch.engines.launcher import Launcher
from manyhands.planning.pace.deadline import Aim, read_aim
from manyhands.planning.planner import read_workers
from manyhands.values import events
from manyhands.values.config import RunConfig, from_dict, read_toml
from manyhands.values.errors import ConfigError
from manyhands.values.loaded_task import Loaded
from manyhands.values.local_folders import local_folder
from manyhands.values.machine import MOST_RANKS
from manyhands.values.planned_faults import FaultPlan
from manyhands.values.run_folder import RunDir, new_run_path
from manyhands.values.run_options import Pace, ResumeRequest, RunRequest
from manyhands.values.server_config import sync_settings

OnStep = Callable[[events.Stepped], object]
OnEvaluate = Callable[[events.Evaluated], object]

Workers = int | tuple[int, int] | None
"""A number, the least and the most, or as many as there is room for."""


@dataclass(frozen=True, kw_only=True)
class Attached:
    """What a run is given that is alive: from Python alone."""

    on_step: OnStep | None = None
    """Called in this process with every logged step; giving it logs every step."""
    on_evaluate: OnEvaluate | None = None
    """Called in this process with the scores of every evaluation."""
    launcher: Launcher | None = None
    """One that the caller keeps warm for several runs."""
    faults: FaultPlan | None = None
    """Failures that are scheduled, for tests."""


NOTHING_ATTACHED = Attached()


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedRun:
    """One run, after everything that was asked was made sense of."""

    run: RunDir
    loaded: Loaded
    config: RunConfig
    workers: Workers
    aim: Aim | None = None
    """A wished speed, which sets the number of workers."""
    on_step: OnStep | None = None
    on_evaluate: OnEvaluate | None = None
    quiet: bool = False
    faults: FaultPlan = FaultPlan()
    asked: float = field(default_factory=time.time)
    given: frozenset[str] = frozenset()
    """Settings given for this resume: they win over earlier live changes."""
    changes: Mapping[int, dict[str, Any]] = field(default_factory=dict[int, dict[str, Any]])
    """Settings that change after so many steps: of the run that is replayed."""
    replays: bool = False
    """It computes what another run did; scores that its schedules heard are among the changes."""
    debug: tuple[int, int] | None = None
    """Stop in a debugger at this micro-batch: (step, index)."""
    notes: Sequence[str] = ()
    """Warnings."""
    plan_notes: Sequence[str] = ()
    """Where settings are from that nobody has written down."""


def resolve(request: RunRequest, attached: Attached) -> ResolvedRun:
    """A run that begins."""
    loaded, own = load(request.task, request.params)
    given = request.config
    said = _says_batch(given if given is not None else _raw_config(request.task, loaded), request)
    loader = loader_settings(loaded.task, said=said)
    config = own
    if given is not None:
        config = (
            given if isinstance(given, RunConfig) else from_dict(_with_batch(given, loader.batch))
        )
    to = (
        local_folder(request.to, "a run")
        if request.to
        else new_run_path(Path("runs"), name_of(loaded))
    )
    resolved = _resolved(request, attached, RunDir(to), loaded, config, loader)
    return replace(resolved, plan_notes=loader.notes(resolved.config))


def _with_batch(config: Mapping[str, Any], batch: int | None) -> Mapping[str, Any]:
    if batch is None or not isinstance(config.get("train", {}), Mapping):
        return config
    return {**config, "train": {"batch": batch, **config.get("train", {})}}


def _says_batch(config: Any, request: RunRequest) -> bool:
    """Whether somebody has chosen train.batch. (Not: 128, in a `RunConfig`.)"""
    if any(setting.partition("=")[0].strip() == "train.batch" for setting in request.settings):
        return True
    if isinstance(config, RunConfig):
        return config.train.batch != RunConfig().train.batch
    return isinstance(config, Mapping) and "batch" in config.get("train", {})


def _raw_config(task: Any, loaded: Loaded) -> Any:
    """The config that came with a task, as it was written."""
    if isinstance(task, str | Path) and Path(task).suffix == ".toml":
        return tomllib.loads(Path(task).read_text())
    return loaded.written


def resolve_again(
    folder: RunDir, request: ResumeRequest, attached: Attached
) -> tuple[ResolvedRun, int]:
    """A run as it was, with what has changed, and the step to go on from."""
    config, _ = read_toml(folder.config)
    wanted = config.with_settings(request.settings)
    refuse_changes(folder, config, wanted)
    loaded, notes = reload(folder, request.task, wanted)
    refuse_other(folder, loaded, request.params)
    step, problems = _step_to_go_on_from(folder)
    return replace(
        _resolved(request, attached, folder, loaded, config),
        given=frozenset(setting.partition("=")[0].strip() for setting in request.settings),
        notes=[*notes, *(f"{p}; using step {step} instead" for p in problems)],
    ), step


def _resolved(
    request: RunRequest | ResumeRequest,
    attached: Attached,
    run: RunDir,
    loaded: Loaded,
    config: RunConfig,
    loader: LoaderSettings | None = None,
) -> ResolvedRun:
    """`loader`: what settings are, if nobody has said anything."""
    first = list[str]()
    if loader is not None and loader.batch is not None:
        first.append(f"train.batch={loader.batch}")
    if loader is not None and loader.readers is not None and config.data.readers == "auto":
        first.append(f"data.readers={loader.readers}")
    workers, aim = _how_many(request, request.asked)
    sync = sync_settings(request.sync) if request.sync is not None else []
    return ResolvedRun(
        run=run,
        loaded=loaded,
        config=config.with_settings([*first, *sync, *request.settings]),
        workers=workers,
        aim=aim,
        on_step=attached.on_step,
        on_evaluate=attached.on_evaluate,
        quiet=request.quiet,
        faults=attached.faults or FaultPlan(),
        asked=request.asked,
        notes=warning_notes(loaded),
    )


def _step_to_go_on_from(folder: RunDir) -> tuple[int, list[str]]:
    """The newest good checkpoint, and what is wrong with newer ones, which are set aside. With none
    that is good, the run begins again: at step 0, and so with the same bits."""
    storage = FolderStorage(folder)
    storage.sweep()
    step, problems = newest_good(storage)
    for newer in storage.steps():  # they may be half of a step, or none
        if newer > (step or 0):
            storage.set_aside(newer)
    return step or 0, problems


def _how_many(pace: Pace, now: float) -> tuple[Workers, Aim | None]:
    """Workers as they were given, or a speed for which they are chosen."""
    workers = read_workers(pace.workers)
    if pace.samples_per_second is None and pace.finish_by is None:
        return workers, None
    if isinstance(workers, int):
        raise ConfigError(
            f"--workers {workers} leaves nothing to choose: with --samples-per-second or "
            f"--finish-by, write a range (--workers 1:{workers}) or leave it out."
        )
    return workers or (1, MOST_RANKS), read_aim(pace.samples_per_second, pace.finish_by, now)
