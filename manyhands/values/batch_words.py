# SPDX-License-Identifier: Apache-2.0
"""What a function was given that took it for something else: names and shapes, for its traceback.

The function is the user's (a loss, a predict), called by us: the outermost frame of their code. So
whatever it is called with is found among its arguments, under the name that they gave it.
"""

from collections.abc import Mapping, Sequence
from types import FrameType, TracebackType
from typing import Any

from manyhands.values.printable_text import printable

MOST_NAMES = 20


def batch_words(frame: FrameType | None, error: BaseException) -> str | None:
    """A line about the argument of `frame` that `error` is about, if it is about any."""
    if frame is None:
        return None
    code = frame.f_code
    for name in code.co_varnames[: code.co_argcount]:
        given = frame.f_locals.get(name)
        if given is not None and _is_about(error, given):
            return printable(f"  {name} {_described(given)}", 2000)
    return None


def first_frame(trace: TracebackType | None, is_library: Any) -> FrameType | None:
    """Of the user's own."""
    while trace is not None and is_library(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return None if trace is None else trace.tb_frame


def _is_about(error: BaseException, given: Any) -> bool:
    try:
        text = str(error)
        if isinstance(given, Mapping):
            missing = isinstance(error, KeyError) and error.args[0] not in given
            return missing or _taken_for_another(error, text, given) or "not str" in text
        if isinstance(given, list | tuple) or hasattr(given, "shape"):
            number = isinstance(error, IndexError | TypeError)
            number = number and ("indices" in text or "index" in text or "type 'str'" in text)
            return number or _taken_for_another(error, text, given)
    except Exception:  # their own classes may do anything
        return False
    return False


def _taken_for_another(error: BaseException, text: str, given: Any) -> bool:
    kind = type(given).__name__
    match error:
        case AttributeError():
            return error.obj is given
        case TypeError():
            return text in (f"'{kind}' object is not callable", "unhashable type: 'slice'")
        case ValueError():
            return "to unpack" in text
        case _:
            return False


def _described(given: Any) -> str:
    if isinstance(given, Mapping):
        items: Mapping[Any, Any] = given
        shown = [f"{name}: {_shape(value)}" for name, value in list(items.items())[:MOST_NAMES]]
        return f"is a {type(given).__name__} with {_listed(shown, len(items))}"
    if isinstance(given, list | tuple):
        parts: Sequence[Any] = given
        shown = [f"[{n}]: {_shape(value)}" for n, value in enumerate(parts[:MOST_NAMES])]
        return f"is a {type(given).__name__} with {_listed(shown, len(parts))}"
    return f"is {_shape(given)}"


def _listed(shown: list[str], count: int) -> str:
    more = f" and {count - len(shown)} more" if count > len(shown) else ""
    return f"{', '.join(shown)}{more}" if shown else "nothing in it"


def _shape(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if isinstance(value, list | tuple):
        items: Sequence[Any] = value
        return f"{type(value).__name__} of {len(items)}"
    return type(value).__name__
