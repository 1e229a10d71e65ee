# SPDX-License-Identifier: Apache-2.0
"""Of a traceback or a stack, the lines of the user's own code."""

import inspect
import sys
import traceback
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from manyhands.values.batch_words import batch_words, device_words, first_frame

MOST_FRAMES = 10
"""Of each end of a stack."""


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
    about = batch_words(first_frame(error.__traceback__, is_library), error)
    hints = [hint for hint in (about, device_words(error)) if hint]
    return "\n".join([*lines, named(error), *hints])


def place_of(function: object) -> str:
    """Where a function (or the class of a callable object) is written, as `file:line`; empty where
    that cannot be told, or it is not the user's."""
    inner: Any = inspect.unwrap(function) if callable(function) else function
    while isinstance(inner, partial):
        inner = inner.func
    code = getattr(inner, "__code__", None) or getattr(type(inner).__call__, "__code__", None)
    if not isinstance(code, CodeType) or is_library(code.co_filename):
        return ""
    return f"{code.co_filename}:{code.co_firstlineno}"


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
