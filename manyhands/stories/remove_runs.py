# SPDX-License-Identifier: Apache-2.0
"""Removing runs: only folders of runs, never one in which somebody is at work."""

import os
import shutil
from pathlib import Path

import msgspec

from manyhands.checkpoint.commit import FolderStorage
from manyhands.monitor.run_pruning import PrunableRun, to_prune
from manyhands.monitor.run_status import status
from manyhands.values.errors import RunDirError
from manyhands.values.run_folder import RunDir, locked, open_run, runs_under

ELSEWHERE_S = 120.0
"""A driver on another host that wrote its status so lately is at work."""


class RemovableRun(msgspec.Struct, frozen=True):
    """What would be removed, in words."""

    run: str
    state: str
    steps: str
    saved: int
    size_bytes: int
    because: str = ""

    def line(self) -> str:
        count = f"{self.saved} checkpoint{'s' * (self.saved != 1)}"
        why = f"; {self.because}" if self.because else ""
        size = f"{self.size_bytes / 1e6:.1f} MB"
        return f"{self.run}  {self.state}, step {self.steps}, {count}, {size}{why}"


def removable(root: Path) -> RemovableRun:
    """An ended run; anything else is refused, with the reason."""
    run = _of_a_run(root)
    if (why := in_use(run)) is not None:
        raise RunDirError(f"{run.root} is not removed: {why}.")
    now = status(run)
    size = sum(f.lstat().st_size for f in run.root.rglob("*") if not f.is_dir())
    saved = len(FolderStorage(run).steps())
    return RemovableRun(str(root), now["state"], f"{now['step']}/{now['total_steps']}", saved, size)


def remove(root: Path) -> None:
    """For good. It is out of sight first: no half of a run is left where runs are."""
    run = _of_a_run(root)
    if (why := in_use(run)) is not None:
        raise RunDirError(f"{run.root} is not removed: {why}.")
    with locked(run):
        gone = run.root.with_name(f".removed-{run.root.name}-{os.getpid()}")
        try:
            run.root.rename(gone)
            shutil.rmtree(gone)
        except OSError as error:
            raise RunDirError(f"cannot remove {run.root}: {error}") from error


def prunable(under: Path, keep: int | None) -> list[RemovableRun]:
    """Runs under a folder that may go, each with the reason."""
    if keep is not None and keep < 0:
        raise RunDirError(f"--keep {keep}: a number of runs, 0 or more.")
    found: list[PrunableRun] = []
    for run in runs_under(under):
        if _is_run(run):
            saved = len(FolderStorage(run).steps())
            busy = in_use(run) is not None
            found.append(PrunableRun(str(run.root), status(run)["state"], busy, saved))
    reasons = to_prune(found, keep)
    return [msgspec.structs.replace(removable(Path(r)), because=why) for r, why in reasons.items()]


def in_use(run: RunDir) -> str | None:
    """Why it cannot go now."""
    if Path.cwd().is_relative_to(run.root.resolve()):
        return "you are in it"
    now = status(run)
    if now["state"] in ("running", "paused") and now.get("seconds_ago", 0.0) < ELSEWHERE_S:
        return f"it is {now['state']} (on {now['host']}, process {now['pid']})"
    try:
        with locked(run):
            return None
    except RunDirError:
        return "another process is at work in it"


def _of_a_run(root: Path) -> RunDir:
    run = open_run(root)
    if root.is_symlink():
        raise RunDirError(f"{root} is not removed: it is a link, to {root.resolve()}.")
    if not _is_run(run):
        raise RunDirError(
            f"{root} is not removed: it has a config.toml, but it is no run's folder."
        )
    return run


def _is_run(run: RunDir) -> bool:
    folders = (run.task, run.checkpoints, run.root / "logs")
    return run.config.is_file() and all(folder.is_dir() for folder in folders)
