# SPDX-License-Identifier: Apache-2.0
"""What a run is doing, from its folder alone. Imports no torch, so it answers at once."""

import platform
import time
from pathlib import Path
from typing import Any

import msgspec

from manyhands.values.events import Failed, Finished, numbers_of, read_events
from manyhands.values.run_folder import RunDir

NEEDED = {"state", "step", "total_steps", "workers", "host", "pid", "time"}


def _written(path: Path) -> dict[str, Any]:
    """What the driver wrote last. It replaces the file as a whole, so one that is half there is
    damaged, and says nothing."""
    nothing: dict[str, Any] = {"state": "starting", "step": 0, "total_steps": 0, "workers": []}
    try:
        found = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        return nothing
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return nothing | {"state": "unknown"}
    return found if found.keys() >= NEEDED else nothing | {"state": "unknown"}


def status(run: RunDir) -> dict[str, Any]:
    """State, step, speed and workers. A driver that is gone without a word has "died"."""
    found = _written(run.status)
    found["run"] = str(run.root)
    if found["state"] in ("running", "paused"):
        here = found["host"] == platform.node()
        if here and not Path(f"/proc/{found['pid']}").exists():
            found["state"] = "died"
        found["seconds_ago"] = time.time() - found["time"]
    last = None
    for event in read_events(run.events):
        if isinstance(event, Failed | Finished):
            last = event
    if isinstance(last, Failed) and found["state"] == "failed":
        found["verdict"] = last.verdict
    if isinstance(last, Finished) and found["state"] == "finished":
        found |= {"scores": numbers_of(last.scores), "fingerprint": last.fingerprint}
    return found
