# SPDX-License-Identifier: Apache-2.0
"""All folds of one task: a run for each, as many side by side as there are cores, then the mean.

Each run is a command of its own, in a folder of its own, so that one that fails or is stopped can
be looked at and resumed like any other. Finished ones are not run again.
"""

import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from manyhands.data.reading.prepared_data import PreparedData
from manyhands.data.shards.manifest import read_manifest
from manyhands.data.shards.prepared_url import RemoteFolder, folder_of
from manyhands.values.errors import RunFailed, TaskError
from manyhands.values.machine import usable_cores
from manyhands.values.report import Report
from manyhands.values.run_folder import RunDir, write_whole
from manyhands.values.task import load_task

SUMMARY = "folds.json"


class Folded(msgspec.Struct, frozen=True):
    """What the folds say together."""

    reports: list[Report]
    means: dict[str, float]
    deviations: dict[str, float]


def train_folds(
    file: Path,
    to: Path,
    *,
    workers: int | None,
    settings: Sequence[str],
    say: Callable[[str], None],
) -> Folded:
    folds = _folds_of(file)
    each = workers or max(1, usable_cores() // folds)
    side_by_side = max(1, usable_cores() // each)

    def train(fold: int) -> Report:
        report = _train(file, to / f"fold-{fold}", fold, each, settings)
        say(f"fold {fold}  " + "  ".join(f"{k} {v:.4f}" for k, v in report.scores.items()))
        return report

    with ThreadPoolExecutor(side_by_side) as pool:
        reports = list(pool.map(train, range(folds)))
    folded = _together(reports)
    write_whole(to / SUMMARY, msgspec.json.encode(folded))
    return folded


def _folds_of(file: Path) -> int:
    data: Any = load_task(file).task.data
    folder = data.folder if isinstance(data, PreparedData) else data
    if isinstance(folder, str):
        folder = folder_of(folder)
    if not isinstance(folder, Path | RemoteFolder):
        raise TaskError("--fold: the task's data is not a prepared folder.")
    if (folds := read_manifest(folder).folds) == 0:
        raise TaskError(f"--fold: {folder} was prepared without folds (prepare --folds 5).")
    return folds


def _train(file: Path, to: Path, fold: int, workers: int, settings: Sequence[str]) -> Report:
    done = RunDir(to).report
    if done.exists():
        return msgspec.json.decode(done.read_bytes(), type=Report)
    sets = [part for setting in settings for part in ("--set", setting)]
    what = ["resume", str(to)] if (to / "config.toml").exists() else ["train", str(file)]
    if what[0] == "train":
        what += ["--to", str(to), "--fold", str(fold), *sets]
    command = [sys.executable, "-m", "manyhands", *what, "--workers", str(workers), "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        raise RunFailed(f"fold {fold} failed ({to}).\n{ended.stderr.strip()}")
    return msgspec.json.decode(ended.stdout, type=Report)


def _together(reports: Sequence[Report]) -> Folded:
    means: dict[str, float] = {}
    deviations: dict[str, float] = {}
    for name in reports[0].scores:
        values = [report.scores[name] for report in reports]
        mean = math.fsum(values) / len(values)
        spread = math.fsum((v - mean) ** 2 for v in values) / max(1, len(values) - 1)
        means[name], deviations[name] = mean, math.sqrt(spread)
    return Folded(list(reports), means, deviations)
