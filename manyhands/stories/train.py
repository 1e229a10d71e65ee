# SPDX-License-Identifier: Apache-2.0
"""Training: what was asked for is made sense of, workers are at hand, the driver sees it through.

`train` begins a run and `resume` goes on with one. Their parameters are the fields of the requests
(values/run_options.py), and what only Python can give (`Attached`).
"""

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from manyhands.driver.drive import drive
from manyhands.driver.resolved_run import NOTHING_ATTACHED, Attached, resolve, resolve_again
from manyhands.launch.choose_engine import open_engine
from manyhands.launch.engines.launcher import Launcher
from manyhands.stories.end_of_run import EndOfRun, at_the_end
from manyhands.stories.load import loadable
from manyhands.values.option_fields import taking
from manyhands.values.report import Report
from manyhands.values.run_folder import locked, open_run
from manyhands.values.run_options import ResumeRequest, RunRequest, Where


@dataclass(frozen=True, kw_only=True)
class TrainCall(Attached, RunRequest):
    """A call of `mh.train`."""


@dataclass(frozen=True, kw_only=True)
class ResumeCall(Attached, ResumeRequest):
    """A call of `mh.resume`."""


@taking(TrainCall)
def train(call: TrainCall) -> Report:
    """Train `task` (or the task that a file defines) and report.

    `workers` is a number, or "2:8" for as many as there is room for between those; or for as many
    as it takes to train `samples_per_second`, or to `finish_by` "18:30" or "2h" (a datetime or a
    timedelta will do). `hosts` are reached by ssh ("a,b:4"), and others join at `listen`
    ("0.0.0.0:7077") with the secret that is in `token_file` or, while it trains, in the run
    folder's join.token. `engine` is "local", "inline", "ray" or "ray://HOST:PORT"; `spread`,
    `worker_resources` and `ray_token_file` are for Ray (docs/ray.md). What `ship` names is found by
    workers on other hosts as well. docs/options.md lists all of them. `settings` are
    `section.key=value` strings, as `--set` takes them. `on_step` is called in this process with
    every logged step; giving it logs every step. `on_evaluate` is called with every evaluation.
    `on_end` is a shell command for afterwards, whatever ended it (docs/train.md). Raises
    `RequestError` when the request is wrong, `RunFailed` when the run fails, `Interrupted`
    after Ctrl-C.
    """
    with at_the_end(call.on_end) as end:
        return train_request(call, call, end)


@taking(ResumeCall)
def resume(call: ResumeCall) -> Report:
    """Continue a run from its newest good checkpoint, with any number of workers.

    A run whose task was made in Python needs that task again.
    """
    with at_the_end(call.on_end) as end:
        return resume_request(call, call, end)


def train_request(
    request: RunRequest, attached: Attached = NOTHING_ATTACHED, end: EndOfRun | None = None
) -> Report:
    """`end` is told the run's folder."""
    with launched(request, attached.launcher) as launcher:
        job = resolve(request, attached)
        if end is not None:
            end.run = job.run.root
        return loadable(drive(job, launcher), job.loaded.task)


def resume_request(
    request: ResumeRequest, attached: Attached = NOTHING_ATTACHED, end: EndOfRun | None = None
) -> Report:
    with launched(request, attached.launcher) as launcher:
        folder = open_run(Path(request.run))
        if end is not None:
            end.run = folder.root
        with locked(folder):
            job, step = resolve_again(folder, request, attached)
            return loadable(drive(job, launcher, resume=step), job.loaded.task)


@contextmanager
def launched(where: Where, warm: Launcher | None) -> Generator[Launcher]:
    """A launcher of our own, or one that the caller keeps warm for several runs."""
    launcher = warm or open_engine(where)
    try:
        yield launcher
    finally:
        launcher.stop() if warm else launcher.close()
