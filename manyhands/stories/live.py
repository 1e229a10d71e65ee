# SPDX-License-Identifier: Apache-2.0
"""Speaking to a run while it goes on. Each returns what the run answered, when it has been done."""

from pathlib import Path

from manyhands.driver.live.command_socket import (
    Ask,
    Change,
    Continue,
    Dismiss,
    Examine,
    NobodyThere,
    Pause,
    Scale,
    StopRun,
    ask,
    wait_until_gone,
)
from manyhands.values.config import read_changes
from manyhands.values.errors import RequestError
from manyhands.values.run_folder import open_run


def scale(run: Path, workers: int | None, wait_s: float, *, servers: int | None = None) -> str:
    if workers is None and servers is None:
        raise RequestError("how many? manyhands scale RUN 4, or manyhands scale RUN --servers 2")
    return _said(run, Scale(workers, servers), wait_s)


def change(run: Path, settings: list[str], wait_s: float) -> str:
    return _said(run, Change(read_changes(settings)), wait_s)


def pause(run: Path, wait_s: float) -> str:
    return _said(run, Pause(), wait_s)


def go_on(run: Path, wait_s: float) -> str:
    return _said(run, Continue(), wait_s)


def stop(run: Path, wait_s: float) -> str:
    return _said(run, StopRun(), wait_s)


def drop_host(run: Path, host: str, wait_s: float) -> str:
    return _said(run, Dismiss(host), wait_s)


def wait_for_the_end(run: Path, wait_s: float) -> None:
    if not wait_until_gone(open_run(run).control, patience_s=wait_s):
        raise RequestError(f"the run in {run} has not ended within {wait_s:.0f} s; it may still.")


def audit(run: Path, wait_s: float) -> str | None:
    """None: nobody is there; the run is over, or its driver was killed and left its socket."""
    if not open_run(run).control.exists():
        return None
    try:
        return _said(run, Examine(), wait_s)
    except NobodyThere:
        return None


def _said(run: Path, what: Ask, wait_s: float) -> str:
    return ask(open_run(run).control, what, patience_s=wait_s)
