# SPDX-License-Identifier: Apache-2.0
"""What a function was given that took it for something else: names, dtypes and shapes, for its
traceback; or that it takes the model and the batch the other way round.

The function is the user's (a loss, a predict), called by us: the outermost frame of their code. So
whatever it is called with is found among its arguments, under the name that they gave it.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from types import FrameType, TracebackType
from typing import Any

from manyhands.values.printable_text import printable

MOST_NAMES = 20

TENSOR_WORDS = re.compile(
    r"dtype|scalar type|types? \(|LongTensor|must be Tensor|not implemented for '|shape|\bsizes?\b|"
    r"dimension|\bdim\b|\b\d-?D\b|channels|batch_size|elements not|out of (bounds|range)|"
    r"num_classes|matrices",
    re.IGNORECASE,
)
"""In what torch says of tensors that do not fit: these words, or some of them."""


MODEL_NAMES = frozenset(("model", "net", "network", "module"))

DEVICE_WORDS = re.compile(
    r"not compiled with CUDA|no NVIDIA driver|No CUDA GPUs|re-initialize CUDA|initialize CUDA "
    r"without|CUDA driver version is insufficient",
    re.IGNORECASE,
)
"""In what torch says where it has no GPU, or a worker may not touch it yet."""


def device_words(error: BaseException) -> str | None:
    """A line for those who put things on a GPU that is not there."""
    if not isinstance(error, RuntimeError | AssertionError):
        return None
    if DEVICE_WORDS.search(str(error)) is None:
        return None
    return (
        '  Workers put the model and each batch on train.device ("cpu", unless it says "cuda") '
        'themselves: leave out .cuda(), .to("cuda") and device="cuda".'
    )


def batch_words(frame: FrameType | None, error: BaseException) -> str | None:
    """A line about the argument of `frame` that `error` is about, if it is about any."""
    if frame is None:
        return None
    if (swapped := _swapped(frame, error)) is not None:
        return printable(swapped, 2000)
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


def _swapped(frame: FrameType, error: BaseException) -> str | None:
    """Of a function that takes the batch first: by the names of its arguments, or by what it does
    with them."""
    code = frame.f_code
    names = [name for name in code.co_varnames[: code.co_argcount] if name != "self"]
    if len(names) != 2:
        return None
    first, second = (frame.f_locals.get(name) for name in names)
    if not _is_module(first) or second is None or _is_module(second):
        return None
    named = names[1] in MODEL_NAMES and names[0] not in MODEL_NAMES
    if not named and not _taken_for_a_batch(error, first) and not _called(error, second):
        return None
    who = "it" if code.co_name in ("<lambda>", "__call__") else code.co_name
    return (
        f"  {who} is called as {'' if who == 'it' else who}(model, batch): {names[0]} is the model "
        f"({type(first).__name__}), {names[1]} {_described(second)}"
    )


def _is_module(given: Any) -> bool:
    """Whether it is torch's, which is not imported here."""
    return any(
        kind.__name__ == "Module" and kind.__module__ == "torch.nn.modules.module"
        for kind in type(given).__mro__
    )


def _taken_for_a_batch(error: BaseException, model: Any) -> bool:
    kind = type(model).__name__
    said = (
        f"'{kind}' object is not subscriptable",
        f"'{kind}' object is not iterable",
        f"cannot unpack non-iterable {kind} object",
        f"object of type '{kind}' has no len()",
    )
    return isinstance(error, TypeError) and str(error) in said


def _called(error: BaseException, batch: Any) -> bool:
    said = f"'{type(batch).__name__}' object is not callable"
    return isinstance(error, TypeError) and str(error) == said


def _is_about(error: BaseException, given: Any) -> bool:
    try:
        text = str(error)
        if isinstance(given, Mapping):
            missing = isinstance(error, KeyError) and error.args[0] not in given
            other = missing or _taken_for_another(error, text, given) or "not str" in text
            return other or _does_not_fit(error, text, given.values())
        if isinstance(given, list | tuple) or hasattr(given, "shape"):
            number = isinstance(error, IndexError | TypeError)
            number = number and ("indices" in text or "index" in text or "type 'str'" in text)
            other = number or _taken_for_another(error, text, given)
            parts: Iterable[Any] = given if isinstance(given, list | tuple) else [given]
            return other or _does_not_fit(error, text, parts)
    except Exception:  # their own classes may do anything
        return False
    return False


def _does_not_fit(error: BaseException, text: str, parts: Iterable[Any]) -> bool:
    """Whether torch says so of dtypes and shapes. Of which tensor it does not say; so what is
    given is told where it holds any."""
    kinds = (RuntimeError, ValueError, IndexError, TypeError, AssertionError)
    holds = any(hasattr(part, "shape") for part in parts)
    return holds and isinstance(error, kinds) and TENSOR_WORDS.search(text) is not None


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
