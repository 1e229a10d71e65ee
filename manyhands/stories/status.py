# SPDX-License-Identifier: Apache-2.0
"""How runs are doing, from their folders alone. Imports no torch, so it answers at once."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from manyhands.checkpoint.commit import FolderStorage, glance, saved_steps
from manyhands.launch.hosts.withdrawn_hosts import read_withdrawn
from manyhands.monitor.run_status import status as status_of
from manyhands.values.errors import ConfigError
from manyhands.values.run_folder import RunDir, open_run, runs_under
from manyhands.values.task_params import read_params


def status(run: Path) -> dict[str, Any]:
    folder = open_run(run)
    storage = FolderStorage(folder)
    now, there = status_of(folder), storage.steps()
    going = now["state"] in ("running", "paused")  # what it deletes is gone before it says so
    gone = set[int]() if going else saved_steps(folder) - set(there)
    damaged = [f"step {step} was saved, and {folder.step(step)} is gone" for step in sorted(gone)]
    damaged += [problem for step in there if (problem := glance(storage, step)) is not None]
    return {**now, **_params(folder), "saved": there, "damaged": damaged}


def _params(run: RunDir) -> dict[str, Any]:
    """Of its task, if it has any. A config.toml that is damaged says nothing."""
    with suppress(OSError, ValueError, ConfigError):
        if found := read_params(run.config):
            return {"params": found}
    return {}


def hosts(run: Path) -> list[dict[str, Any]]:
    """Those that work for it now, the driver's first; and those that were dropped from it."""
    folder = open_run(run)
    now = status_of(folder)
    going = now["state"] in ("running", "paused")
    found: list[dict[str, Any]] = now.get("hosts", []) if going else []
    dropped = [
        {"name": host.name, "since": host.time, "state": "dropped", "token": _whose(host.token)}
        for host in read_withdrawn(folder)
    ]
    nothing = {"address": "", "slots": 0, "ranks": []}
    return [*found, *(nothing | row for row in dropped)]


def _whose(token: str) -> str:
    return "its own" if token else "shared"


def list_runs(under: Path) -> list[dict[str, Any]]:
    """Oldest first; `began` in seconds since 1970."""
    found: list[dict[str, Any]] = []
    for run in runs_under(under):
        now = status_of(run)
        row = {key: now[key] for key in ("run", "state", "step", "total_steps")} | _params(run)
        found.append(row | {"scores": now.get("scores", {}), "began": run.config.stat().st_ctime})
    return found
