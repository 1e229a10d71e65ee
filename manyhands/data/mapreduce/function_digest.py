# SPDX-License-Identifier: Apache-2.0
"""A digest of functions, to tell whether a checkpoint was made by the same ones.

It covers a function's code and the whole file that it is in, what it has closed over, and the
globals it names. Of other modules' functions it covers their file, not what they call in turn.
When in doubt it differs: work is then done again, never taken over wrongly.
"""

import functools
import inspect
import marshal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, cast

import numpy as np

from manyhands.data.mapreduce.plain_values import NotPlain, encode
from manyhands.data.mapreduce.resumable_tasks import digest_of


def function_digest(*functions: Callable[..., Any] | None) -> str:
    words = [w for f in functions for w in _words(f, getattr(f, "__module__", None), set())]
    return digest_of(*words)


def _words(value: Any, home: str | None, seen: set[int]) -> Iterator[bytes | str]:
    """Everything about a value that can change what a function of module `home` does with it."""
    if isinstance(value, ModuleType):
        yield value.__name__
    elif isinstance(value, FunctionType):
        yield from _function_words(value, home, seen)
    elif isinstance(value, type):
        kind = cast(type[object], value)
        yield f"{kind.__module__}.{kind.__qualname__}"
        yield _file_of(kind)
    elif isinstance(value, MethodType | functools.partial):
        inside: list[Any] = (
            [value.__func__, value.__self__]
            if isinstance(value, MethodType)
            else [value.func, *value.args, *sorted(value.keywords.items())]
        )
        for each in inside:
            yield from _words(each, home, seen)
    elif isinstance(value, np.ndarray):
        yield f"{value.dtype} {value.shape}"
        yield value.tobytes()
    else:
        yield from _words(type(value), home, seen)
        try:
            yield encode(value)
        except NotPlain:
            yield repr(value)  # with an address in it, it is another one each time, as it should be


def _function_words(
    function: FunctionType, home: str | None, seen: set[int]
) -> Iterator[bytes | str]:
    if id(function) in seen:
        return
    seen.add(id(function))
    code = function.__code__
    yield f"{function.__module__}.{function.__qualname__}, line {code.co_firstlineno}"
    yield code.co_code
    # Without a file, as in a notebook: marshal is not always the same, but then only differs.
    yield _file_of(function) or marshal.dumps(code)
    if function.__module__ != home:
        return
    held = [function.__defaults__, function.__kwdefaults__]
    held += [cell.cell_contents for cell in function.__closure__ or ()]
    named = sorted(_names(code) & function.__globals__.keys())
    for each in [*held, *(function.__globals__[name] for name in named)]:
        yield from _words(each, home, seen)


def _names(code: CodeType) -> set[str]:
    inner = [_names(each) for each in code.co_consts if isinstance(each, CodeType)]
    return set(code.co_names).union(*inner)


def _file_of(value: FunctionType | type[object]) -> bytes:
    try:
        return Path(inspect.getfile(value)).read_bytes()
    except (OSError, TypeError):
        return b""
