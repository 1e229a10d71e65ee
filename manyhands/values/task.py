# SPDX-License-Identifier: Apache-2.0
"""What a user brings: model, loss, data, optimizer, scores. Plain PyTorch, no base class."""

import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

from manyhands.values.config import RunConfig, from_dict
from manyhands.values.errors import RequestError, TaskError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

    Loss = Tensor | tuple[Any, ...]

MOST_FRAMES = 10
"""Of each end of a stack."""

MODULE_NAME = "manyhands_task"
"""What a task file is called while it is loaded."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model, how it learns and how it is scored. The way of training is not in here."""

    model: "Callable[[], Module] | Module"
    """Builds the module. A module itself is taken as it is, with its weights."""

    loss: "Callable[[Module, Any], Loss] | None" = None
    """`loss(model, batch)`: a mean over the batch's records, or `(mean, weight)` where the mean is
    over something else (tokens, say), or either with a dict of numbers to log at the end."""

    optimizer: "Callable[[Module], Optimizer] | None" = None
    """`optimizer(model)`: any optimizer, any groups."""

    schedule: "Callable[[Optimizer], Any] | None" = None
    """`schedule(optimizer)`: a learning-rate scheduler, stepped once per optimizer step."""

    data: Any = None
    """A dict of tensors or arrays with one row per record, a map-style Dataset, or a prepared
    folder (its path, or `mh.prepared(...)`)."""

    held_out: Any = None
    """Likewise, for scores; or a fraction of `data`, set aside by a fixed shuffle."""

    predict: "Callable[[Module, Any], tuple[Tensor, Tensor]] | None" = None
    """`predict(model, batch)`: predictions and targets, one row per record."""

    scores: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Name → torchmetrics metric, or a function over all predictions and targets."""

    # Models that are not trained by gradients (k-means, EM) will give `contribute` and `apply`
    # here in place of `loss` and `optimizer`: the sum between them is the same canonical sum.

    def __post_init__(self) -> None:
        for name in ("model", "loss", "optimizer"):
            if not callable(getattr(self, name)):
                given = getattr(self, name)
                what = "is missing" if given is None else f"is {type(given).__name__}"
                raise TaskError(f"Task: {name} {what}; give a function. See docs/task.md.")
        for name in ("schedule", "predict"):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                raise TaskError(f"Task: {name} is not a function. See docs/task.md.")
        if self.data is None:
            raise TaskError(
                "Task: data is missing; give a dict of tensors, a Dataset or a prepared folder."
            )
        if self.scores and self.predict is None:
            raise TaskError(
                "Task: scores need predict=lambda model, batch: (predictions, targets)."
            )
        if "loss" in self.scores:
            raise TaskError("Task: a score cannot be called 'loss'; that one is always there.")
        for name, score in self.scores.items():
            if not callable(score):
                raise TaskError(
                    f"Task: score '{name}' is neither a torchmetrics metric nor a function."
                )
        if isinstance(self.held_out, (int, float)) and not 0 < self.held_out < 1:
            raise TaskError(
                f"Task: held_out = {self.held_out} is not a fraction between 0 and 1; "
                "leave it out to hold out nothing."
            )


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


def user_traceback(error: BaseException, source: Path | None = None) -> str:
    """The traceback with the user's frames only, innermost first, then the exception.

    Frames of manyhands, torch and the import machinery are left out unless nothing remains: at
    3 a.m. the line of one's own code is wanted.
    """
    own = own_frames(error)
    if not own and error.__cause__ is not None:  # as when a generator turns StopIteration into it
        own = own_frames(error.__cause__)
    lines = _shown(own or traceback.extract_tb(error.__traceback__)[-3:])
    if isinstance(error, SyntaxError) and error.filename:
        lines.insert(0, f"  {error.filename}:{error.lineno}\n    {(error.text or '').strip()}")
    return "\n".join([*lines, named(error)])


def own_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Those of the user's own code, innermost last."""
    return _own(traceback.extract_tb(error.__traceback__))


def user_stack(frame: FrameType) -> str:
    """Where a thread is, in the user's own code, innermost first; empty when it is not in it."""
    return "\n".join(_shown(_own(traceback.extract_stack(frame))))


def named(error: BaseException) -> str:
    """An exception's class and text. What people write into `__str__` may fail in turn."""
    name = type(error).__name__
    try:
        text = str(error)
    except BaseException as another:
        return f"{name} (its text cannot be shown: {type(another).__name__})"
    return f"{name}: {text}" if text else name


def _own(frames: list[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    return [f for f in frames if not is_library(f.filename)]


def _shown(frames: list[traceback.FrameSummary]) -> list[str]:
    """Innermost first; of a deep recursion, both ends."""
    lines = [f"  {f.filename}:{f.lineno} in {f.name}\n    {f.line}" for f in frames[::-1]]
    left_out = len(lines) - 2 * MOST_FRAMES
    if left_out <= 0:
        return lines
    return [*lines[:MOST_FRAMES], f"  ... {left_out} more ...", *lines[-MOST_FRAMES:]]


def is_library(filename: str) -> bool:
    """Whether it is not the user's own: also on a host where manyhands is somewhere else."""
    parts = Path(filename).parts
    ours = Path(__file__).parent.parent
    if ours.name in parts:
        inside = parts[len(parts) - parts[::-1].index(ours.name) :]
        if inside[:1] != ("zoo",) and ours.joinpath(*inside).is_file():
            return True
    return (
        filename.startswith("<frozen")
        or "site-packages" in parts
        or "dist-packages" in parts
        or filename.startswith(sys.base_prefix + "/lib")
        or (Path(filename).is_relative_to(ours) and not Path(filename).is_relative_to(ours / "zoo"))
    )
