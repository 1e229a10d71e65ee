# SPDX-License-Identifier: Apache-2.0
"""Runs beside each other: what they came to, and what of their task and config differs."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from manyhands.accounting import ledger, ledger_lines
from manyhands.monitor.run_status import status
from manyhands.monitor.terminal import duration
from manyhands.values.config import EFFECTS, SECTIONS, RunConfig, read_toml
from manyhands.values.errors import ConfigError, RunDirError
from manyhands.values.events import Evaluated, numbers_of, read_events
from manyhands.values.run_folder import RunDir
from manyhands.values.task_params import read_params
from manyhands.values.toml_values import written_value


class ComparedRun(msgspec.Struct, frozen=True):
    """What a folder says of its run."""

    run: str
    result: dict[str, str]
    """State, steps, time, loss, scores, fingerprint."""
    params: dict[str, str]
    config: dict[str, str]
    """Setting → value; all of them."""
    task: dict[str, str]
    """Its file, what the file held, and the versions that it was begun with."""


def look_at(run: RunDir) -> ComparedRun:
    """Whatever can be read; a damaged file says nothing."""
    now, report = status(run), _json(run.report)
    result = {"state": now["state"], "steps": f"{now['step']}/{now['total_steps']}"}
    if "seconds" in report:
        result["time"] = duration(report["seconds"])
        result["samples/s"] = f"{report['samples_per_s']:,.0f}"
        result["workers"] = str(report["workers"])
    loss = report.get("loss", now.get("loss"))
    if isinstance(loss, float):
        result["loss"] = f"{loss:.6g}"
    scores = _last_scores(run)
    result |= {f"held-out {name}": f"{value:.6g}" for name, value in scores.items()}
    if "fingerprint" in now:
        result["fingerprint"] = f"{now['fingerprint'][:16]}…"
    if by_timing := _taken_by_timing(run):
        result["weights"] = f"depended on timing in {by_timing} steps"
    params, config, task = dict[str, str](), dict[str, str](), dict[str, str]()
    with suppress(OSError, ValueError, ConfigError):
        params = {name: written_value(value) for name, value in read_params(run.config).items()}
        found, file = read_toml(run.config)
        config = _settings(found)
        task = {"task": file or "made in Python"}
    note = _json(run.task_note)
    task |= {
        "task's text": str(note.get("sha256", ""))[:12],
        "data": str(note.get("data", ""))[:12],
    }
    task |= {name: str(version) for name, version in note.get("versions", {}).items()}
    return ComparedRun(str(run.root), result, params, config, task)


def rows(runs: Sequence[ComparedRun]) -> dict[str, list[str]]:
    """What is shown of each: all that they came to, and of the rest what is not the same in all."""
    found = _rows([run.result for run in runs], all_of=True)
    found |= {f"param {n}": row for n, row in _rows([run.params for run in runs]).items()}
    found |= _rows([run.config for run in runs])
    return found | _rows([run.task for run in runs])


def _rows(given: Sequence[Mapping[str, str]], *, all_of: bool = False) -> dict[str, list[str]]:
    names: Iterable[str] = dict.fromkeys(name for one in given for name in one)
    found = {name: [one.get(name, "-") for one in given] for name in names}
    return {name: row for name, row in found.items() if all_of or len(set(row)) > 1}


def _settings(config: RunConfig) -> dict[str, str]:
    found: dict[str, str] = {}
    for path in EFFECTS:
        name, _, key = path.partition(".")
        value = getattr(getattr(config, name) or SECTIONS[name](), key)
        found[path] = "-" if value is None else written_value(value)
    return found


def _taken_by_timing(run: RunDir) -> int:
    """How many of its steps no other run would take alike: workers were at different steps. The
    ledger knows; the config is only how it goes on."""
    with suppress(OSError, RunDirError):
        lines = ledger_lines.surviving(ledger.read(run.ledger))
        return sum(line.stop - line.first for line in lines if line.computed is not None)
    return 0


def _last_scores(run: RunDir) -> dict[str, float]:
    last: dict[str, float] = {}
    for event in read_events(run.events):
        if isinstance(event, Evaluated):
            last = numbers_of(event.scores)
    return last


def _json(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return {}
