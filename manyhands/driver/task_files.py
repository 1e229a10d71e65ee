# SPDX-License-Identifier: Apache-2.0
"""Finding a run's task, weights and config, now and again later; refusing what cannot work."""

import platform
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from manyhands.checkpoint.commit import FolderStorage, newest_sound
from manyhands.checkpoint.step_files import MODEL
from manyhands.data.open_data import open_task, prepared_of
from manyhands.data.reading.records import Records, sampled_digest
from manyhands.evaluation.early_stopping import criterion
from manyhands.values.config import EFFECTS, RunConfig, changed, from_dict, read_toml, to_toml
from manyhands.values.errors import (
    CheckpointDamaged,
    CheckpointMismatch,
    ConfigError,
    RunDirError,
    TaskError,
)
from manyhands.values.loaded_task import Loaded, load_task
from manyhands.values.ported_task import PortedTask
from manyhands.values.printable_text import one_line, printable
from manyhands.values.run_folder import RunDir, open_run, write_whole
from manyhands.values.shell_commands import command_line
from manyhands.values.task import Task
from manyhands.values.task_params import (
    GivenParams,
    given_params,
    no_params,
    read_params,
    recorded,
    refuse_other_params,
    settled,
)
from manyhands.values.version import VERSION


def load(
    task: Task | PortedTask | str | Path, params: GivenParams = ()
) -> tuple[Loaded, RunConfig]:
    """A task from Python, from a .py file, or from TOML that names one; and its config."""
    given = given_params(params)
    if isinstance(task, PortedTask):
        loaded, _ = load(task.task, params)
        return replace(loaded, written=task.config), from_dict(task.config)
    if isinstance(task, Task):
        if given:
            raise no_params(given, "what was given")
        return Loaded(task, None, None, None), RunConfig()
    try:
        path = Path(task)
    except TypeError:
        raise TaskError(_no_task(task)) from None
    if path.suffix != ".toml":
        loaded = load_task(path, given)
        return loaded, loaded.config or RunConfig()
    config, named = read_toml(path)
    if named is None:
        raise ConfigError(f'{path} names no task; put task = "file.py" at its top.')
    return load_task(path.parent / named, read_params(path) | given), config


def _no_task(given: object) -> str:
    what = f"the task is {type(given).__name__}"
    if isinstance(given, Mapping):
        return f"{what}: make one of it with mh.Task(**that)."
    if callable(given):
        name = getattr(given, "__name__", "it")
        return f"{what}: give what it returns, {name}(...), or the file that defines it."
    return f"{what}: give a mh.Task, or the file that defines one."


class TaskNote(msgspec.Struct, frozen=True):
    """task/task.json: how to find the task again, and what it was trained on."""

    source: str | None
    sha256: str
    data: str
    versions: dict[str, str]


def reload(
    run: RunDir, task: Task | None, config: RunConfig, *, with_data: bool = True
) -> tuple[Loaded, list[str]]:
    """A run's task again, and what is different about it now. `config` says where its data is;
    without it, the data is not looked at, and need not be there."""
    try:
        note = msgspec.json.decode(run.task_note.read_bytes(), type=TaskNote)
    except (OSError, msgspec.MsgspecError) as error:
        raise RunDirError(f"{run.task_note} cannot be read: {error}") from error
    notes: list[str] = []
    if task is not None:
        loaded = Loaded(task, None, None, None, params=read_params(run.config))
    elif note.source is None:
        raise RunDirError(
            f"the task of {run.root} was made in Python, so only Python can make it again: "
            f"mh.resume({str(run.root)!r}, task). mh.evaluate, mh.predict and mh.load take it too."
        )
    else:
        source = Path(note.source)
        if not source.exists():
            notes.append(f"{source} is gone; using the copy in {run.task}")
            source = run.task / source.name
        try:
            loaded = load_task(source, read_params(run.config))
        except ConfigError as error:
            raise TaskError(
                f"{source} takes other parameters than those that {run.root} was begun with: "
                f"{error} As it was then: {run.task / source.name}"
            ) from error
        if loaded.sha256 != note.sha256:
            notes.append(f"{source} has changed since the run began; results may differ")
    if with_data:
        records, _ = open_task(loaded.task, config)
        if sampled_digest(records) != note.data:
            notes.append("the training data is not what the run began with; results may differ")
    notes += warning_notes(loaded)
    for name, version in _versions().items():
        if note.versions.get(name) != version:
            notes.append(_other_version(name, note.versions.get(name), version))
    return loaded, notes


def describe_run(run: RunDir, loaded: Loaded, config: RunConfig, records: Records) -> None:
    write_whole(run.config, config_text(loaded, config))
    source = loaded.source
    note = TaskNote(
        str(source) if source else None, loaded.sha256, sampled_digest(records), _versions()
    )
    write_whole(run.task_note, msgspec.json.format(msgspec.json.encode(note)))
    if source is not None:
        write_whole(run.task / source.name, loaded.text)
    if loaded.warned:
        kept = printable("\n".join(loaded.warned) + "\n")
        write_whole(run.root / "logs" / "task-file.log", kept)
    if (data := prepared_of(loaded.task.data, config.data)) is not None:
        # Arrow is not needed by others.
        from manyhands.data.serving.stored_encoders import store_encoders

        store_encoders(data.folder, run.encoders)


def warning_notes(loaded: Loaded) -> list[str]:
    """How often the task's own code warned while it was loaded, and the first of them."""
    if not (count := len(loaded.warned)):
        return []
    times = "once" if count == 1 else f"{count} times; first"
    return [f"the task's own code warned {times}: {one_line(loaded.warned[0])}"]


def config_text(loaded: Loaded, config: RunConfig) -> str:
    """config.toml: with it, `manyhands train` begins the same run again."""
    source = str(loaded.source) if loaded.source else None
    return to_toml(config, task=source, params=recorded(loaded.params))


def _versions() -> dict[str, str]:
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "manyhands": VERSION,
    }


def _other_version(name: str, then: str | None, now: str) -> str:
    note = f"the run began with {name} {then}, this is {now}; bits may differ"
    if name == "torch" and then is not None:  # its kernels are what computes
        note += f". To compute what it would have, use that one: pip install torch=={then}"
    return note


def weights_file(config: RunConfig) -> str | None:
    """What train.start_from means: a file, or the newest good step of a run folder."""
    if config.train.start_from is None:
        return None
    path = Path(config.train.start_from)
    if path.is_file():
        return str(path.absolute())
    if not path.is_dir():
        raise ConfigError(f"train.start_from: {path} is neither a run folder nor a file.")
    storage = FolderStorage(open_run(path))
    try:
        step = newest_sound(storage)
    except CheckpointDamaged as error:
        raise CheckpointMismatch(
            f"train.start_from: {error} To begin with that one, give its {MODEL}."
        ) from error
    if step is None:
        raise CheckpointMismatch(f"train.start_from: {path} holds no checkpoint.")
    return str((storage.run.step(step) / MODEL).absolute())


def check_criteria(config: RunConfig, task: Task, held_out: Records | None) -> None:
    """Scores that decide something must exist; better said now than after an hour."""
    wanted: dict[str, str] = {}
    if config.evaluate is not None:
        wanted["evaluate.by"] = config.evaluate.by
    if config.checkpoint.keep_best is not None:
        wanted["checkpoint.keep_best"] = config.checkpoint.keep_best
    known = ["loss", *task.scores]
    for setting, text in wanted.items():
        if held_out is None:
            section = "[evaluate]" if setting == "evaluate.by" else setting
            raise ConfigError(
                f"{section} needs held-out records, and the task has none: give it held_out=."
            )
        score = criterion(text).score
        if score not in known and score.partition("/")[0] not in known:
            raise ConfigError(f"{setting} = {text}: the task's scores are {', '.join(known)}.")


def refuse_changes(run: RunDir, before: RunConfig, after: RunConfig) -> None:
    """What the steps already taken followed from stays as it was when they go on."""
    for setting, (was, now) in changed(before, after).items():
        if EFFECTS[setting] in ("weights", "saved"):
            said = "left out" if was is None else was
            raise ConfigError(
                f"--set {setting}={now}: {setting} is part of the result, and the steps that "
                f"{run.root} has taken were taken with {setting} {said}. A run keeps it for life; "
                f"start a new one: {command_line('train', 'FILE', '--set', f'{setting}={now}')}"
                f"{_instead_of(setting, run)}"
            )


def refuse_other(run: RunDir, loaded: Loaded, given: GivenParams) -> None:
    """Parameters of the task, likewise."""
    if not (asked := given_params(given)):
        return
    if loaded.source is None or loaded.module is None:
        raise no_params(asked, "the task that was given")
    if not callable(function := getattr(loaded.module, "task", None)) or not loaded.params:
        raise no_params(asked, loaded.source)
    wanted = settled(function, {**loaded.params, **asked}, loaded.source)
    again = command_line("train", loaded.source)
    refuse_other_params(run.root, loaded.params, wanted, again)


def _instead_of(setting: str, run: RunDir) -> str:
    """How what was learnt can be gone on with all the same, where that is no leak."""
    if setting == "data.fold":
        return " (not from these weights: they have seen what that fold holds out)."
    if setting == "train.start_from":
        return "."
    given = shlex.quote(f"train.start_from={run.root}")
    return f" (from these weights: --set {given})."


def name_of(loaded: Loaded) -> str:
    if loaded.source is not None:
        return loaded.source.stem
    model: Any = loaded.task.model
    return getattr(model, "__name__", type(model).__name__).lower()
