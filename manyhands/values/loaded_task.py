# SPDX-License-Identifier: Apache-2.0
"""A Python file that defines a task, run; and where the task came from."""

import hashlib
import importlib.util
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from manyhands.values.config import RunConfig, from_dict
from manyhands.values.errors import RequestError, TaskError
from manyhands.values.task import Task
from manyhands.values.user_frames import user_traceback

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

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()


def load_task(path: Path) -> Loaded:
    """Run a Python file that defines `task` (and, if it likes, `config`)."""
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
    try:
        with redirect_stdout(sys.stderr):  # what a command prints may be read by a program
            spec.loader.exec_module(module)
    except RequestError:
        raise
    except (Exception, SystemExit) as error:
        raise TaskError(
            f"the task file {path} could not be run.\n{user_traceback(error, path)}"
        ) from error
    task = getattr(module, "task", None)
    if not isinstance(task, Task):
        found = (
            "defines no `task`" if task is None else f"has a `task` of type {type(task).__name__}"
        )
        raise TaskError(f"{path} {found}; write: task = mh.Task(model=..., loss=..., ...)")
    config = getattr(module, "config", None)
    if isinstance(config, Mapping):
        config = from_dict(config)
    if not isinstance(config, RunConfig | None):
        raise TaskError(f"{path}: `config` is {type(config).__name__}, not mh.RunConfig or a dict.")
    return Loaded(task, config, path, module, text)
