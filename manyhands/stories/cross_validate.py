# SPDX-License-Identifier: Apache-2.0
"""All folds of one task: a run for each, on this host as many side by side as there are cores, then
the mean.

Each run is a command of its own, in a folder of its own, so that one that fails or is stopped can
be looked at and resumed like any other. Finished ones are not run again.
"""

import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec

from manyhands.data.reading.prepared_data import PreparedData
from manyhands.data.shards.manifest import read_manifest
from manyhands.data.shards.prepared_url import RemoteFolder, folder_of
from manyhands.driver.task_files import load
from manyhands.values.config import EFFECTS, RunConfig, changed, read_toml
from manyhands.values.errors import RequestError, RunFailed, TaskError
from manyhands.values.loaded_task import Loaded
from manyhands.values.local_folders import local_folder
from manyhands.values.machine import usable_cores
from manyhands.values.option_fields import command_option
from manyhands.values.report import Report
from manyhands.values.run_folder import RunDir, write_whole
from manyhands.values.run_options import RunRequest
from manyhands.values.task_params import params_text, read_params, recorded

SUMMARY = "folds.json"


class Folded(msgspec.Struct, frozen=True):
    """What the folds say together."""

    reports: list[Report]
    means: dict[str, float]
    deviations: dict[str, float]


REFUSED = {
    "listen": "hosts that join leave with the run that they joined, which is the first fold's",
    "finish_by": "one time cannot be kept by several runs",
}
"""Options of `train` that mean nothing for several runs, and why."""


def train_folds(request: RunRequest, to: Path, *, say: Callable[[str], None]) -> Folded:
    """`request` is that of `train`, for every fold; its task is a file."""
    for name, why in REFUSED.items():
        if getattr(request, name) is not None:
            raise RequestError(f"--fold all takes no --{name.replace('_', '-')}: {why}.")
    to = local_folder(to, "runs")
    file = Path(str(request.task))
    loaded, config = load(file, request.params)
    folds = _folds_of(loaded.task.data)
    each, side_by_side = _room(request, folds)

    def train(fold: int) -> Report:
        report = _train(request.but(workers=each), loaded, config, to / f"fold-{fold}", fold)
        say(f"fold {fold}  " + "  ".join(f"{k} {v:.4f}" for k, v in report.scores.items()))
        return report

    with ThreadPoolExecutor(side_by_side) as pool:
        reports = list(pool.map(train, range(folds)))
    folded = _together(reports)
    write_whole(to / SUMMARY, msgspec.json.encode(folded))
    return folded


def _room(request: RunRequest, folds: int) -> tuple[int | str | None, int]:
    """Workers of each fold, and how many folds are trained at a time. Where the workers are not
    ours to count (on other hosts, on Ray, as many as a speed takes), folds come one by one."""
    counted = request.workers is None or str(request.workers).isdigit()
    local = request.engine == "local" and not request.asks_for_hosts
    if not local or not counted or request.samples_per_second is not None:
        return request.workers, 1
    each = int(request.workers or max(1, usable_cores() // folds))
    return each, max(1, usable_cores() // max(1, each))


def _folds_of(data: Any) -> int:
    folder = data.folder if isinstance(data, PreparedData) else data
    if isinstance(folder, str):
        folder = folder_of(folder)
    if not isinstance(folder, Path | RemoteFolder):
        raise TaskError("--fold: the task's data is not a prepared folder.")
    if (folds := read_manifest(folder).folds) == 0:
        raise TaskError(f"--fold: {folder} was prepared without folds (prepare --folds 5).")
    return folds


def _train(request: RunRequest, loaded: Loaded, config: RunConfig, to: Path, fold: int) -> Report:
    run = RunDir(to)
    if run.report.exists():
        _refuse_other_params(run, loaded)
        _refuse_another(run, config.with_settings([*request.settings, f"data.fold={fold}"]))
        return msgspec.json.decode(run.report.read_bytes(), type=Report)
    command = fold_command(request, to, fold, resumed=run.config.exists())
    ended = subprocess.run(
        [sys.executable, "-m", "manyhands", *command], capture_output=True, text=True, check=False
    )
    if ended.returncode != 0:
        raise RunFailed(f"fold {fold} failed ({to}).\n{ended.stderr.strip()}")
    return msgspec.json.decode(ended.stdout, type=Report)


def fold_command(request: RunRequest, to: Path, fold: int, *, resumed: bool) -> list[str]:
    """What trains one fold, or goes on with it: every option that was given is passed on."""
    what = ["resume"] if resumed else ["train", "--to", str(to), "--fold", str(fold)]
    for each in fields(request):
        how, value = command_option(each), getattr(request, each.name)
        if (
            how is None
            or how.argument
            or each.name in ("to", "quiet", "on_end")
            or value == each.default
        ):
            continue
        flag = (how.flags or (f"--{each.name.replace('_', '-')}",))[0]
        if how.type is bool:
            what.append(flag)
        else:
            what += [f"{flag}={one}" for one in (value if how.many else [value])]
    return [*what, "--json", "--", str(to if resumed else request.task)]


def _refuse_another(run: RunDir, wanted: RunConfig) -> None:
    """A fold that is done is not trained again; but it must be the one that is asked for."""
    before, _ = read_toml(run.config)
    for setting, (was, now) in changed(before, wanted).items():
        if EFFECTS[setting] != "nothing":
            raise RequestError(
                f"{run.root} is finished, and was trained with {setting} = {was}; now it would be "
                f"{now}. Give another --to, or remove that folder."
            )


def _refuse_other_params(run: RunDir, loaded: Loaded) -> None:
    before = read_params(run.config)
    if (was := params_text(before)) != (now := params_text(recorded(loaded.params))):
        raise RequestError(
            f"{run.root} is finished, and was trained with --param {was or 'left out'}; now it "
            f"would be {now or 'left out'}. Give another --to, or remove that folder."
        )


def _together(reports: Sequence[Report]) -> Folded:
    means: dict[str, float] = {}
    deviations: dict[str, float] = {}
    for name in reports[0].scores:
        values = [report.scores[name] for report in reports]
        mean = math.fsum(values) / len(values)
        spread = math.fsum((v - mean) ** 2 for v in values) / max(1, len(values) - 1)
        means[name], deviations[name] = mean, math.sqrt(spread)
    return Folded(list(reports), means, deviations)
