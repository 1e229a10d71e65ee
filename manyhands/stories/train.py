# SPDX-License-Identifier: Apache-2.0
"""The driver: load → plan → launch → supervise → report. The story of one run.

`train` and `resume` are the two ways in; both end in `drive`. What the supervisor reports on the
way is dealt with at the desk (desk.py).
"""

import shutil
import signal
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from manyhands.accounting.ledger import Book, Opened, journal_of, new_book, old_book
from manyhands.checkpoint.commit import Folder, newest_good
from manyhands.data.open_data import make_ready, open_data
from manyhands.driver.bookkeeping import Desk, Job, OnStep, drivers_fault
from manyhands.driver.live.command_socket import Control
from manyhands.driver.live.live_requests import People
from manyhands.driver.supervise.worker_states import Limits, Situation
from manyhands.driver.supervisor import Supervisor
from manyhands.driver.task_files import (
    check_criteria,
    describe_run,
    load,
    name_of,
    refuse_changes,
    reload,
    task_line,
    weights_file,
)
from manyhands.driver.workforce import aim_at, most_workers, reserve, room_for, tempo_of
from manyhands.launch.choose_engine import open_engine
from manyhands.launch.engines.launcher import Berth, Launcher
from manyhands.launch.hosts.requested_hosts import Wish
from manyhands.launch.shipping import ship_task
from manyhands.launch.wire.channel import Switchboard
from manyhands.planning.pace.deadline import FinishBy
from manyhands.planning.planner import Plan, plan, read_workers
from manyhands.training.collective.collective import PRIVATE
from manyhands.values import events
from manyhands.values.config import RunConfig, from_dict, read_toml, to_toml
from manyhands.values.credentials import new_secret
from manyhands.values.errors import RunDirError
from manyhands.values.faults import FaultPlan
from manyhands.values.orders import Orders
from manyhands.values.report import Report
from manyhands.values.rundir import RunDir, locked, new_run_path, open_run, write_whole
from manyhands.values.task import Task
from manyhands.values.verdict import Cause


def train(
    task: Task | str | Path,
    *,
    to: str | Path | None = None,
    workers: int | str | None = None,
    samples_per_second: float | None = None,
    finish_by: FinishBy | None = None,
    config: RunConfig | Mapping[str, Any] | None = None,
    settings: Sequence[str] = (),
    on_step: OnStep | None = None,
    quiet: bool = False,
    engine: str = "local",
    hosts: str | None = None,
    listen: str | None = None,
    token_file: str | Path | None = None,
    spread: bool = False,
    worker_resources: str | None = None,
    ray_token_file: str | Path | None = None,
    ship: Sequence[str | Path] = (),
    launcher: Launcher | None = None,
    faults: FaultPlan | None = None,
) -> Report:
    """Train `task` (or the task that a file defines) and report.

    `workers` is a number, or "2:8" for as many as there is room for between those; or for as many
    as it takes to train `samples_per_second`, or to `finish_by` "18:30" or "2h" (a datetime or a
    timedelta will do). `hosts` are
    reached by ssh ("a,b:4"), and others join at `listen` ("0.0.0.0:7077") with the secret that is
    in `token_file` or, while it trains, in the run folder's join.token. `engine` is "local",
    "inline", "ray" or "ray://HOST:PORT"; the next three are for Ray (docs/ray.md). What `ship`
    names is found by workers on other hosts as well.
    `settings` are `section.key=value` strings, as `--set` takes them. `on_step` is called in this
    process with every logged step; giving it logs every step. Raises `RequestError` when the
    request is wrong, `RunFailed` when the run fails, `Interrupted` after Ctrl-C.
    """
    wish = Wish(
        hosts,
        listen,
        Path(token_file) if token_file else None,
        spread=spread,
        worker_resources=worker_resources,
        ray_token_file=Path(ray_token_file) if ray_token_file else None,
        ship=tuple(Path(path) for path in ship),
    )
    asked = time.time()
    with _launched(engine, wish, launcher) as hands:
        loaded, base = load(task)
        chosen = config if isinstance(config, RunConfig) else from_dict(config or {})
        chosen = (chosen if config is not None else base).with_settings(settings)
        run = RunDir(Path(to) if to else new_run_path(Path("runs"), name_of(loaded)))
        hired = read_workers(workers)
        job = Job(run, loaded, chosen, hired, on_step, quiet, faults or FaultPlan())
        job = aim_at(job, samples_per_second, finish_by, asked)
        return drive(job, hands, resume=None)


def resume(
    run: str | Path,
    task: Task | None = None,
    *,
    workers: int | str | None = None,
    samples_per_second: float | None = None,
    finish_by: FinishBy | None = None,
    settings: Sequence[str] = (),
    on_step: OnStep | None = None,
    quiet: bool = False,
    engine: str = "local",
    hosts: str | None = None,
    listen: str | None = None,
    token_file: str | Path | None = None,
    spread: bool = False,
    worker_resources: str | None = None,
    ray_token_file: str | Path | None = None,
    ship: Sequence[str | Path] = (),
    launcher: Launcher | None = None,
    faults: FaultPlan | None = None,
) -> Report:
    """Continue a run from its newest good checkpoint, with any number of workers.

    A run whose task was made in Python needs that task again.
    """
    wish = Wish(
        hosts,
        listen,
        Path(token_file) if token_file else None,
        spread=spread,
        worker_resources=worker_resources,
        ray_token_file=Path(ray_token_file) if ray_token_file else None,
        ship=tuple(Path(path) for path in ship),
    )
    asked = time.time()
    with _launched(engine, wish, launcher) as hands:
        folder = open_run(Path(run))
        refuse_changes(settings)
        with locked(folder):
            job, step = _again(folder, task, settings)
            job = replace(job, workers=read_workers(workers), on_step=on_step, quiet=quiet)
            job = aim_at(job, samples_per_second, finish_by, asked)
            return drive(replace(job, faults=faults or FaultPlan()), hands, resume=step)


def _again(folder: RunDir, task: Task | None, settings: Sequence[str]) -> tuple[Job, int]:
    """A run as it was, with what has changed, and the step to go on from."""
    config, _ = read_toml(folder.config)
    loaded, notes = reload(folder, task)
    storage = Folder(folder)
    storage.sweep()
    step, problems = newest_good(storage)
    if step is None:
        found = f" ({'; '.join(problems)})" if problems else ""
        raise RunDirError(f"{folder.root} holds no checkpoint to resume from{found}.")
    for newer in storage.steps():
        if newer > step:
            storage.set_aside(newer)
    notes += [f"{p}; using step {step} instead" for p in problems]
    config = config.with_settings(settings)
    given = frozenset(setting.partition("=")[0].strip() for setting in settings)
    job = Job(folder, loaded, config, None, None, False, FaultPlan(), given=given, notes=notes)
    return job, step


def drive(job: Job, launcher: Launcher, *, resume: int | None) -> Report:
    """Train from the beginning, or from a saved step of the run."""
    started = time.time() if launcher.used else launcher.born
    records, held_out = open_data(job.loaded.task.data, job.loaded.task.held_out, job.config.data)
    check_criteria(job.config, job.loaded.task, held_out)
    made = plan(
        job.config.train,
        launcher.inventory(),
        workers=job.workers,
        records=len(records),
        most_workers=launcher.most_workers,
        many_hosts=launcher.many,
        paced=job.aim is not None,
    )
    if resume is not None and resume >= made.steps.value:
        raise RunDirError(
            f"{job.run.root} is finished (step {resume} of {made.steps.value}). To train longer: "
            f"manyhands resume {job.run.root} --set train.epochs=... (or train.steps=...)"
        )
    start_from = weights_file(job.config) if resume is None else None
    reserve(job, launcher, made)
    here, fetch = (1, "nothing") if launcher.many else (made.workers.value, "all")  # others do it
    make_ready(records, held_out, workers=here, quiet=job.quiet, fetch=fetch)
    with _folder(job.run, new=resume is None):
        if resume is None:
            describe_run(job.run, job.loaded, job.config, records)
        write_whole(job.run.plan, msgspec.json.format(msgspec.json.encode(made)))
        for left_over in job.run.root.glob(".rendezvous-*"):  # of a driver that was killed
            left_over.unlink()
        parcel = ship_task.pack(job.loaded, launcher.fds[0], many=launcher.many)
        launcher.load(parcel.end, job.run.root, job.config.recovery.host_s)
        book, first_worker = _book(job, len(records), resume)
        desk = Desk(job, made, resume or 0, started, book, start_from)
        write_whole(job.run.config, to_toml(job.config, task=task_line(job.loaded)))
    held = nullcontext() if resume is not None else locked(job.run)  # `resume` holds it already
    with held:
        for note in job.notes:
            desk.event(events.Warned(text=note))
        orders = Orders(
            worker=0,
            keys=None,
            run=str(job.run.root.absolute()),
            config=job.config,
            collective=made.collective.value,
            parcel=parcel,
            task_fd=launcher.fds[0],
            state_fd=launcher.fds[1],
            secret=new_secret(),
            steps=made.steps.value,
            start_from=start_from,
            debug=job.debug,
            log_every=1 if job.on_step else job.config.log.every_steps,
            faults=job.faults,
        )
        return _work(job, launcher, desk, made, orders, resume, first_worker)


def _book(job: Job, records: int, resume: int | None) -> tuple[Book, int]:
    """The ledger, opened or gone on with; and the number of the next worker."""
    train, path = job.config.train, job.run.ledger
    opened = Opened(records, train.batch, train.micro_batch_size, train.seed)
    if resume is None:
        return new_book(path, opened, job.changes), 0
    return old_book(path, opened, resume, job.given)


def _work(
    job: Job,
    launcher: Launcher,
    desk: Desk,
    made: Plan,
    orders: Orders,
    resume: int | None,
    first_worker: int,
) -> Report:
    """See the run to its end."""
    switchboard, control = Switchboard(launcher.listens), Control(job.run.control)

    def start(worker: int) -> Berth:
        berth = launcher.berth(worker)
        mine = msgspec.structs.replace(
            orders,
            worker=worker,
            order=worker - first_worker,
            keys=switchboard.keys_for(berth.driver),
            run=berth.run or orders.run,
            task_fd=berth.fds[0],
            state_fd=berth.fds[1],
            address=berth.address,
            shares=berth.shares,
        )
        launcher.start(worker, msgspec.msgpack.encode(mine), job.run.log(worker))
        return berth

    try:
        situation = _situation(job, launcher, desk, made, resume)
        tempo, room = tempo_of(job, launcher, made, situation, desk), room_for(job, launcher, made)
        desk.outlook = tempo.outlook if tempo is not None else desk.outlook
        people = People(situation, desk, control, room=room, want=launcher.want, tempo=tempo)
        supervisor = Supervisor(
            launcher,
            switchboard,
            desk,
            situation,
            people=people,
            start=start,
            first_worker=first_worker,
        )
        return _supervise(supervisor, launcher, desk)
    finally:
        launcher.stop()
        control.close()
        switchboard.close()
        desk.close()


def _situation(
    job: Job, launcher: Launcher, desk: Desk, made: Plan, resume: int | None
) -> Situation:
    """What the supervisor knows before anything has happened."""
    recovery = job.config.recovery
    scored, enough = desk.last_score()
    return Situation(
        wanted=made.workers.value,
        least=job.workers[0] if isinstance(job.workers, tuple) else 1,
        replaceable=launcher.replaceable,
        private=made.collective.value in PRIVATE,
        restore=resume,
        micro_batches=made.micro_batches.value,
        most=most_workers(job, launcher, made),
        journal=journal_of(desk.book.changes),
        limits=Limits(silent_s=recovery.silent_s, stuck_s=recovery.stuck_s, losses=recovery.losses),
        rebalance=recovery.rebalance,
        scored=scored,
        enough=enough,
        saved=-1 if resume is None else resume,
    )


def _supervise(supervisor: Supervisor, launcher: Launcher, desk: Desk) -> Report:
    """Until the run is over. Nothing of it is alive any more when its end is told."""
    try:
        with _asked_to_stop() as supervisor.people.stop_asked:
            outcome = supervisor.run()
        launcher.stop()
        if isinstance(outcome, Cause):
            raise desk.fail(outcome)
        return desk.finish(outcome)
    except KeyboardInterrupt:
        launcher.stop()
        raise desk.interrupted() from None
    except OSError as error:  # ours: the disk under the run folder, most likely
        launcher.stop()
        raise desk.fail(drivers_fault(error, desk.progress.step)) from error


@contextmanager
def _folder(run: RunDir, *, new: bool) -> Generator[None]:
    """A new run's folder; a request that turns out to be wrong leaves none behind."""
    if new:
        run.create()
    try:
        yield
    except BaseException:
        if new:
            shutil.rmtree(run.root, ignore_errors=True)
        raise


@contextmanager
def _launched(engine: str, wish: Wish, launcher: Launcher | None) -> Generator[Launcher]:
    """A launcher of our own, or one that the caller keeps warm for several runs."""
    hands = launcher or open_engine(engine, wish)
    try:
        yield hands
    finally:
        hands.stop() if launcher else hands.close()


@contextmanager
def _asked_to_stop() -> Generator[Callable[[], bool]]:
    """Ctrl-C, SIGTERM and SIGHUP ask the run to stop and save; a second one does not wait."""
    asked = threading.Event()

    def ask(number: int, frame: object) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return
    wanted = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    heeded = [s for s in wanted if signal.getsignal(s) is not signal.SIG_IGN]  # nohup stays nohup
    before = {s: signal.signal(s, ask) for s in heeded}
    try:
        yield asked.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
