# SPDX-License-Identifier: Apache-2.0
"""The driver: load → plan → launch → supervise → report. The story of one run.

`train` and `resume` are the two ways in; both end in `_drive`. What the supervisor reports is
handled by `Desk`, which writes events, commits checkpoints and keeps the display up to date.
"""

import os
import platform
import shutil
import signal
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from manyhands import events
from manyhands.checkpoint.files import MODEL
from manyhands.checkpoint.storage import FileRecord, Folder, Manifest, newest_good, to_delete
from manyhands.checkpoint.tensors import fingerprint
from manyhands.config import RunConfig, from_dict, read_toml, to_toml
from manyhands.data.records import Records, open_data, sampled_digest
from manyhands.errors import (
    CheckpointDamaged,
    CheckpointMismatch,
    ConfigError,
    Interrupted,
    RequestError,
    RunDirError,
    RunFailed,
)
from manyhands.evaluate.progress import best_step, criterion, should_stop
from manyhands.launch import shipping
from manyhands.launch.launchers import Inline, Launcher, Local, create_segments
from manyhands.launch.membership import Cause
from manyhands.launch.messages import Beat, SavedFile
from manyhands.launch.supervisor import Done, Supervisor, WorkerStatus
from manyhands.launch.wire import Switchboard
from manyhands.monitor.terminal import Display, Progress, display
from manyhands.monitor.writers import CsvWriter, TensorBoardWriter, Writer
from manyhands.plan.planner import Plan, plan
from manyhands.report import Report
from manyhands.rundir import RunDir, new_run_path, open_run, write_whole
from manyhands.task import Loaded, Task, load_task
from manyhands.testing.faults import FaultPlan
from manyhands.verdict import Verdict
from manyhands.version import VERSION
from manyhands.worker import Orders, main

WORKER = "manyhands.worker:main"

OnStep = Callable[[events.Stepped], object]


def train(
    task: Task | str | Path,
    *,
    to: str | Path | None = None,
    workers: int | None = None,
    config: RunConfig | Mapping[str, Any] | None = None,
    settings: Sequence[str] = (),
    on_step: OnStep | None = None,
    quiet: bool = False,
    engine: str = "local",
    launcher: Launcher | None = None,
    faults: FaultPlan | None = None,
) -> Report:
    """Train `task` (or the task that a file defines) and report.

    `settings` are `section.key=value` strings, as `--set` takes them. `on_step` is called in this
    process with every logged step; giving it logs every step. Raises `RequestError` when the
    request is wrong, `RunFailed` when the run fails, `Interrupted` after Ctrl-C.
    """
    with _launched(engine, launcher) as hands:
        loaded, base = load(task)
        chosen = config if isinstance(config, RunConfig) else from_dict(config or {})
        chosen = (chosen if config is not None else base).with_settings(settings)
        run = RunDir(Path(to) if to else new_run_path(Path("runs"), _name(loaded)))
        job = Job(run, loaded, chosen, workers, on_step, quiet, faults or FaultPlan())
        return _drive(job, hands, resume=None)


def resume(
    run: str | Path,
    task: Task | None = None,
    *,
    workers: int | None = None,
    settings: Sequence[str] = (),
    on_step: OnStep | None = None,
    quiet: bool = False,
    engine: str = "local",
    launcher: Launcher | None = None,
    faults: FaultPlan | None = None,
) -> Report:
    """Continue a run from its newest good checkpoint, with any number of workers.

    A run whose task was made in Python needs that task again.
    """
    with _launched(engine, launcher) as hands:
        folder = open_run(Path(run))
        _refuse_if_running(folder)
        _refuse_changes(settings)
        config, _ = read_toml(folder.config)
        loaded, notes = reload(folder, task)
        storage = Folder(folder)
        storage.sweep()
        step, problems = newest_good(storage)
        if step is None:
            found = f" ({'; '.join(problems)})" if problems else ""
            raise RunDirError(f"{folder.root} holds no checkpoint to resume from{found}.")
        notes += [f"{p}; using step {step} instead" for p in problems]
        chosen = config.with_settings(settings)
        if chosen != config:
            write_whole(folder.config, to_toml(chosen, task=_task_line(loaded)))
        job = Job(folder, loaded, chosen, workers, on_step, quiet, faults or FaultPlan(), notes)
        return _drive(job, hands, resume=step)


@dataclass(frozen=True, slots=True)
class Job:
    """One call of `train` or `resume`, after its arguments were made sense of."""

    run: RunDir
    loaded: Loaded
    config: RunConfig
    workers: int | None
    on_step: OnStep | None
    quiet: bool
    faults: FaultPlan
    notes: Sequence[str] = ()


def _drive(job: Job, launcher: Launcher, *, resume: int | None) -> Report:
    started = time.time() if launcher.used else launcher.born
    records, held_out = open_data(job.loaded.task.data, job.loaded.task.held_out)
    _check_criteria(job.config, job.loaded.task, held_out)
    made = plan(
        job.config.train,
        launcher.inventory(),
        workers=job.workers,
        records=len(records),
        most_workers=launcher.most_workers,
    )
    if resume is not None and resume >= made.steps.value:
        raise RunDirError(
            f"{job.run.root} is finished (step {resume} of {made.steps.value}). To train longer: "
            f"manyhands resume {job.run.root} --set train.epochs=... (or train.steps=...)"
        )
    start_from = _weights_file(job.config) if resume is None else None
    if resume is None:
        job.run.create()
        _describe_run(job, records)
    write_whole(job.run.plan, msgspec.json.format(msgspec.json.encode(made)))
    parcel = shipping.pack(job.loaded, launcher.fds[0])
    switchboard = Switchboard()
    desk = Desk(job, made, resume or 0, started)
    try:
        for note in job.notes:
            desk.event(events.Warned(text=note))
        for worker in range(made.workers.value):
            orders = Orders(
                worker=worker,
                keys=switchboard.keys,
                run=str(job.run.root.absolute()),
                config=job.config,
                collective=made.collective.value,
                parcel=parcel,
                task_fd=launcher.fds[0],
                state_fd=launcher.fds[1],
                steps=made.steps.value,
                resume=resume,
                start_from=start_from,
                log_every=1 if job.on_step else job.config.log.every_steps,
                faults=job.faults,
            )
            launcher.start(worker, msgspec.msgpack.encode(orders), job.run.log(worker))
        with _asked_to_stop() as stop_asked:
            supervisor = Supervisor(
                launcher, switchboard, desk, wanted=made.workers.value, stop_asked=stop_asked
            )
            outcome = supervisor.run()
        launcher.stop()  # before the verdict: nothing of the run is alive when it is printed
        if isinstance(outcome, Cause):
            raise desk.fail(outcome)
        return desk.finish(outcome)
    except KeyboardInterrupt:
        launcher.stop()
        raise desk.interrupted() from None
    finally:
        launcher.stop()
        switchboard.close()
        desk.close()


class Desk:
    """The driver's side of everything the supervisor reports."""

    def __init__(self, job: Job, made: Plan, first_step: int, started: float) -> None:
        self.job, self.plan, self.started = job, made, started
        self.storage = Folder(job.run)
        self.log = events.EventLog(job.run.events)
        self.display: Display = display(quiet=job.quiet)
        self.writers = _writers(job)
        self.first_step_s = 0.0
        self.first_beat: tuple[float, int] | None = None
        self.last_beat: tuple[float, int] = (started, 0)
        self.failure: RequestError | CheckpointDamaged | None = None
        self.state = "running"
        self.status_of: list[WorkerStatus] = []
        self.history = [
            (e.step, e.scores)
            for e in events.read_events(job.run.events)
            if isinstance(e, events.Evaluated) and e.step <= first_step
        ]
        self.progress = Progress(
            step=first_step,
            total_steps=made.steps.value,
            steps_per_epoch=made.steps_per_epoch,
            batch=job.config.train.batch,
            workers=made.workers.value,
        )
        verb = f"resuming at step {first_step}" if first_step else "training"
        self.display.note(f"{verb} in {job.run.root}")
        for line in made.lines():
            self.display.note(f"  {line}")
        self.event(
            events.Started(
                step=first_step,
                total_steps=made.steps.value,
                workers=made.workers.value,
                pid=os.getpid(),
                host=platform.node(),
            )
        )

    # ---- what the supervisor tells

    def event(self, event: events.AnyEvent) -> None:
        self.log.write(event)
        self.display.event(event)
        for writer in self.writers:
            writer.write(event)

    def beat(self, beat: Beat) -> None:
        if beat.loss is None:
            return
        now = time.time()
        if self.first_beat is None:
            self.first_beat, self.first_step_s = (now, beat.records), now - self.started
            self.last_beat = self.first_beat  # what came before was start-up, not training
        then, before = self.last_beat
        if beat.records > before and now > then:
            speed = (beat.records - before) / (now - then)
            old = self.progress.samples_per_s
            self.progress.samples_per_s = speed if not old else 0.8 * old + 0.2 * speed
            self.last_beat = (now, beat.records)
        self.progress.step, self.progress.loss = beat.step, beat.loss
        self.display.progress(self.progress)
        for record in beat.steps:
            event = events.Stepped(
                step=record.step,
                epoch=record.epoch,
                loss=record.loss,
                lr=record.lr,
                samples_per_s=self.progress.samples_per_s,
                numbers=record.numbers,
            )
            self.event(event)
            if self.job.on_step is not None:
                self.job.on_step(event)

    def status(self, workers: list[WorkerStatus]) -> None:
        self.status_of = workers
        self._write_status()

    def scored(self, step: int, scores: dict[str, float]) -> str | None:
        self.event(events.Evaluated(step=step, scores=scores))
        self.history = [h for h in self.history if h[0] != step] + [(step, scores)]
        evaluate = self.job.config.evaluate
        if evaluate is None:
            return None
        return should_stop(self.history, by=evaluate.by, patience=evaluate.stop_early)

    def written(self, step: int, files: list[SavedFile], blocked_s: float) -> None:
        manifest = Manifest(step, {f.name: FileRecord(f.size_bytes, f.sha256) for f in files})
        self.storage.commit(manifest)
        self.event(events.Saved(step=step, size_bytes=manifest.size_bytes, blocked_s=blocked_s))
        self._retain()

    def _retain(self) -> None:
        checkpoint = self.job.config.checkpoint
        if checkpoint is None:
            return
        steps = self.storage.steps()
        best = None
        if checkpoint.keep_best is not None:
            saved = [(step, scores) for step, scores in self.history if step in steps]
            best = best_step(saved, checkpoint.keep_best)
        for step, because in to_delete(steps, keep_last=checkpoint.keep_last, best=best).items():
            self.storage.delete(step)
            self.event(events.Deleted(step=step, because=because))

    # ---- how it ends

    def finish(self, done: Done) -> Report:
        step = done.leader.step
        weights = self.job.run.step(step) / MODEL
        mark = fingerprint(weights)
        if done.leader.because == "stopped":
            self.state = "stopped"
            self.event(events.Stopped(step=step))
            raise Interrupted(str(self.job.run.root), step)
        self.state = "finished"
        scores = next((s for at, s in reversed(self.history) if at == step), {})
        seconds = time.time() - self.started
        report = Report(
            run=str(self.job.run.root),
            step=step,
            epochs=step / self.plan.steps_per_epoch,
            because=done.leader.because,
            loss=done.leader.loss,
            scores=scores,
            fingerprint=mark,
            workers=self.plan.workers.value,
            seconds=seconds,
            samples_per_s=self._mean_speed(),
            first_step_s=self.first_step_s,
            peak_memory_bytes=done.peak_memory_bytes,
        )
        write_whole(self.job.run.report, msgspec.json.format(msgspec.json.encode(report)))
        self.event(
            events.Finished(step=step, because=report.because, fingerprint=mark, scores=scores)
        )
        return report

    def _mean_speed(self) -> float:
        if self.first_beat is None:
            return 0.0
        (then, before), (now, records) = self.first_beat, self.last_beat
        return (records - before) / (now - then) if now > then else self.progress.samples_per_s

    def fail(self, cause: Cause) -> RequestError | RunFailed:
        """Write the verdict down; returns the error to raise."""
        self.state = "failed"
        self.storage.sweep()
        if cause.request:
            steps = self.storage.steps()
            if not steps:  # nothing was computed: leave no half-made run behind
                self._forget()
            return RequestError(cause.what)
        verdict = Verdict.of(
            cause,
            run=str(self.job.run.root),
            log=str(self.job.run.log(cause.rank)),
            saved=max(self.storage.steps(), default=None),
        )
        text = verdict.page()
        self.event(events.Failed(step=cause.step, verdict=text))
        with suppress(OSError):  # the disk may be what failed
            write_whole(self.job.run.verdict, msgspec.json.format(msgspec.json.encode(verdict)))
        return RunFailed(text)

    def interrupted(self) -> Interrupted:
        self.state = "stopped"
        self.storage.sweep()
        saved = max(self.storage.steps(), default=None)
        self.event(events.Stopped(step=saved or 0))
        return Interrupted(str(self.job.run.root), saved)

    def _forget(self) -> None:
        self.state = "forgotten"
        shutil.rmtree(self.job.run.root, ignore_errors=True)

    def close(self) -> None:
        if self.state == "running":
            self.state = "failed"
        self._write_status()
        self.display.close()
        self.log.close()
        for writer in self.writers:
            writer.close()
        for path in self.job.run.root.glob(".rendezvous-*"):
            path.unlink(missing_ok=True)

    def _write_status(self) -> None:
        if self.state == "forgotten":
            return
        status = {
            "state": self.state,
            "step": self.progress.step,
            "total_steps": self.progress.total_steps,
            "loss": self.progress.loss,
            "samples_per_s": self.progress.samples_per_s,
            "pid": os.getpid(),
            "host": platform.node(),
            "time": time.time(),
            "workers": self.status_of,
        }
        with suppress(OSError):
            write_whole(self.job.run.status, msgspec.json.format(msgspec.json.encode(status)))


# ---- finding things


def load(task: Task | str | Path) -> tuple[Loaded, RunConfig]:
    """A task from Python, from a .py file, or from TOML that names one; and its config."""
    if isinstance(task, Task):
        return Loaded(task, None, None, None), RunConfig()
    path = Path(task)
    if path.suffix != ".toml":
        loaded = load_task(path)
        return loaded, loaded.config or RunConfig()
    config, named = read_toml(path)
    if named is None:
        raise ConfigError(f'{path} names no task; put task = "file.py" at its top.')
    return load_task(path.parent / named), config


class TaskNote(msgspec.Struct, frozen=True):
    """task/task.json: how to find the task again, and what it was trained on."""

    source: str | None
    sha256: str
    data: str
    versions: dict[str, str]


def reload(run: RunDir, task: Task | None) -> tuple[Loaded, list[str]]:
    """A run's task again, and what is different about it now."""
    note = msgspec.json.decode((run.task / "task.json").read_bytes(), type=TaskNote)
    notes: list[str] = []
    if task is not None:
        loaded = Loaded(task, None, None, None)
    elif note.source is None:
        raise RunDirError(
            f"the task of {run.root} was made in Python, so only Python can make it again: "
            f"mh.resume({str(run.root)!r}, task)"
        )
    else:
        source = Path(note.source)
        if not source.exists():
            notes.append(f"{source} is gone; using the copy in {run.task}")
            source = run.task / source.name
        loaded = load_task(source)
        if loaded.sha256 != note.sha256:
            notes.append(f"{source} has changed since the run began; results may differ")
    records, _ = open_data(loaded.task.data, loaded.task.held_out)
    if sampled_digest(records) != note.data:
        notes.append("the training data is not what the run began with; results may differ")
    for name, version in _versions().items():
        if note.versions.get(name) != version:
            then = note.versions.get(name)
            notes.append(f"the run began with {name} {then}, this is {version}; bits may differ")
    return loaded, notes


def _describe_run(job: Job, records: Records) -> None:
    write_whole(job.run.config, to_toml(job.config, task=_task_line(job.loaded)))
    source = job.loaded.source
    note = TaskNote(
        str(source) if source else None, job.loaded.sha256, sampled_digest(records), _versions()
    )
    write_whole(job.run.task / "task.json", msgspec.json.format(msgspec.json.encode(note)))
    if source is not None:
        write_whole(job.run.task / source.name, job.loaded.text)


def _task_line(loaded: Loaded) -> str | None:
    return str(loaded.source) if loaded.source else None


def _versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "manyhands": VERSION,
    }


def _weights_file(config: RunConfig) -> str | None:
    """What train.start_from means: a file, or the newest good step of a run folder."""
    if config.train.start_from is None:
        return None
    path = Path(config.train.start_from)
    if path.is_file():
        return str(path.absolute())
    if not path.is_dir():
        raise ConfigError(f"train.start_from: {path} is neither a run folder nor a file.")
    storage = Folder(open_run(path))
    step, problems = newest_good(storage)
    if step is None:
        raise CheckpointMismatch(f"train.start_from: {path} has no good checkpoint. {problems}")
    return str((storage.run.step(step) / MODEL).absolute())


def _check_criteria(config: RunConfig, task: Task, held_out: Records | None) -> None:
    """Scores that decide something must exist; better said now than after an hour."""
    wanted: dict[str, str] = {}
    if config.evaluate is not None:
        wanted["evaluate.by"] = config.evaluate.by
    if config.checkpoint is not None and config.checkpoint.keep_best is not None:
        wanted["checkpoint.keep_best"] = config.checkpoint.keep_best
    known = ["loss", *task.scores]
    for setting, text in wanted.items():
        if held_out is None:
            section = "[evaluate]" if setting == "evaluate.by" else setting
            raise ConfigError(
                f"{section} needs held-out records, and the task has none: give it held_out=."
            )
        score = criterion(text).score
        if score.partition("/")[0] not in known:
            raise ConfigError(f"{setting} = {text}: the task's scores are {', '.join(known)}.")


def _refuse_if_running(run: RunDir) -> None:
    with suppress(OSError, msgspec.MsgspecError, KeyError):
        status = msgspec.json.decode(run.status.read_bytes())
        same_host = status["host"] == platform.node()
        if status["state"] == "running" and same_host and Path(f"/proc/{status['pid']}").exists():
            raise RunDirError(
                f"{run.root} is running (process {status['pid']}); stop it first with Ctrl-C."
            )


def _refuse_changes(settings: Sequence[str]) -> None:
    """Only what does not change the steps already taken may be set on a resume."""
    for setting in settings:
        path = setting.partition("=")[0].strip()
        free = ("train.epochs", "train.steps", "train.collective")
        if path.startswith("train.") and path not in free:
            raise ConfigError(
                f"--set {setting}: a resumed run keeps its [train] settings (only "
                f"{', '.join(free)} may change). Start a new run with train.start_from instead."
            )


def _name(loaded: Loaded) -> str:
    if loaded.source is not None:
        return loaded.source.stem
    model: Any = loaded.task.model
    return getattr(model, "__name__", type(model).__name__).lower()


def _writers(job: Job) -> list[Writer]:
    writers: list[Writer] = []
    if job.config.log.csv:
        writers.append(CsvWriter(job.run.metrics))
    if job.config.log.tensorboard:
        writers.append(TensorBoardWriter(job.run.tensorboard))
    return writers


# ---- processes and signals


@contextmanager
def _launched(engine: str, launcher: Launcher | None) -> Generator[Launcher]:
    """A launcher of our own, or one that the caller keeps warm for several runs."""
    hands = launcher or start_launcher(engine)
    try:
        yield hands
    finally:
        hands.stop() if launcher else hands.close()


def start_launcher(engine: str) -> Launcher:
    if engine == "inline":
        return Inline(main, create_segments())
    if engine != "local":
        raise RequestError(f"there is no engine '{engine}'; use local or inline.")
    return Local(WORKER, create_segments())


@contextmanager
def _asked_to_stop() -> Generator[Callable[[], bool]]:
    """Ctrl-C and SIGTERM ask the run to stop and save; a second one does not wait for that."""
    asked = threading.Event()

    def ask(number: int, frame: object) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return
    before = {s: signal.signal(s, ask) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
