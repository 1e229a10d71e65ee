# SPDX-License-Identifier: Apache-2.0
"""A Python file that defines a task, run; and where the task came from."""

import hashlib
import importlib.util
import sys
import traceback
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from manyhands.values.config import RunConfig, from_dict
from manyhands.values.errors import RequestError, TaskError
from manyhands.values.ported_task import PortedTask
from manyhands.values.task import Task
from manyhands.values.task_params import Params, called, no_params, settled
from manyhands.values.user_frames import own_frames, user_traceback

MODULE_NAME = "manyhands_task"
"""What a task file is called while it is loaded."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A task and where it came from, so that resume and replay can find it again."""

    task: Task
    config: RunConfig | None
    """What the file itself defines as `config`, if it does."""
    source: Path | None
    module: ModuleType | None
    text: str = ""
    params: Params = field(default_factory=dict[str, Any])
    """What its function was called with, where it is made by one."""
    warned: tuple[str, ...] = ()
    """What its code warned of meanwhile."""
    written: Any = None
    """Its config as it was written."""

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


def load_task(path: Path, params: Params | None = None) -> Loaded:
    """Run a Python file that defines `task`, or a function of that name which makes it (and, if it
    likes, `config`)."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"cannot read the task file {path}: {error}") from error
    if path.suffix != ".py":
        raise TaskError(f"{path}: a task file is Python (.py), or TOML that names one.")
    path = path.resolve()
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # as `python file.py` would
    spec = importlib.util.spec_from_file_location(MODULE_NAME, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE_NAME] = module
    warned: list[str] = []
    with _as_a_program(path, "the task file {} could not be run.", warned):
        spec.loader.exec_module(module)
    task, given = getattr(module, "task", None), dict(params or {})
    if callable(task) and not isinstance(task, Task):
        given = settled(task, given, path)
        task = _made(task, given, path, warned)
    elif given:
        raise no_params(given, path)
    config = getattr(module, "config", None)
    if isinstance(task, PortedTask):
        task, own = task
        config = own if config is None else config
    if not isinstance(task, Task):
        found = (
            "defines no `task`" if task is None else f"has a `task` of type {type(task).__name__}"
        )
        raise TaskError(f"{path} {found}; write: task = mh.Task(model=..., loss=..., ...)")
    written = config
    if isinstance(config, Mapping):
        config = from_dict(config)
    if not isinstance(config, RunConfig | None):
        raise TaskError(f"{path}: `config` is {type(config).__name__}, not mh.RunConfig or a dict.")
    return Loaded(task, config, path, module, text, given, tuple(warned), written)


def _made(
    function: Callable[..., Any], params: Params, path: Path, warned: list[str]
) -> Task | PortedTask:
    with _as_a_program(path, "task() of {} could not be run.", warned):
        made = called(function, params)
    if isinstance(made, Task | PortedTask):
        return made
    what = "nothing: does it end with `return mh.Task(...)`?"
    if made is not None:
        what = f"{type(made).__name__}; it must return mh.Task(...)."
    raise TaskError(f"task() of {path} returned {what}")


@contextmanager
def _as_a_program(path: Path, failed: str, warned: list[str]) -> Generator[None]:
    """The user's own code, as `python file.py` would run it: without any arguments of ours. What it
    warns of (and does not filter) is kept in `warned`, out of what we print."""
    before, sys.argv = sys.argv, [str(path)]
    show = warnings.showwarning

    def keep(message: Any, category: Any, filename: str, lineno: int, *_: Any) -> None:
        warned.append(f"{filename}:{lineno}: {category.__name__}: {message}")

    warnings.showwarning = keep
    try:
        with redirect_stdout(sys.stderr):  # what a command prints may be read by a program
            yield
    except RequestError as error:
        own = [f for f in own_frames(error) if not f.filename.startswith("<")]  # a dataclass's
        where = [f"\n  {f.filename}:{f.lineno} in {f.name}" for f in own[-1:]]
        raise type(error)("".join([str(error), *where])) from error
    except (Exception, SystemExit) as error:
        files = [Path(frame.filename).stem for frame in traceback.extract_tb(error.__traceback__)]
        hint = ARGUMENTS if isinstance(error, SystemExit) and "argparse" in files else ""
        raise TaskError(f"{failed.format(path)}\n{user_traceback(error, path)}{hint}") from error
    finally:
        sys.argv = before
        if warnings.showwarning is keep:
            warnings.showwarning = show


ARGUMENTS = (
    "\nA task file is given no arguments. Make them parameters of the task: "
    "def task(lr=1e-3): return mh.Task(...), and --param lr=3e-4"
)
