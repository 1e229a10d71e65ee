# SPDX-License-Identifier: Apache-2.0
"""`train.compile`: forward and backward of the whole model as code that torch's inductor makes.

What is compiled must not depend on what a worker has computed before. So every kind of input gets
code of its own, for its very shapes (`dynamic=False`: torch would go over to code for any size with
the second size it meets), random numbers are torch's own (`fallback_random`), and where torch would
quietly give up and compute without the compiler, after too many kinds, it is an error.

Code is made in each worker, without helpers (a forked process has none), and the compiler's work is
shared: inductor's cache is one for the host and compiler, and who comes second waits for who
compiles. Which compiler that is, compiler_mark.py says. Only
forward with gradients is compiled: scores and predictions are computed as everywhere else.
"""

import os
import shlex
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import Module

from manyhands.values.errors import RequestError, TaskError

MOST_KINDS = 16
"""Of input, for which code is made; torch's own limit is 8."""


def compile_forward(model: Module) -> None:
    """Calls of `model` with gradients run compiled from now on, in this process."""
    set_up_compiler()
    plain: Callable[..., Any] = model._call_impl  # pyright: ignore[reportUnknownMemberType, reportPrivateUsage, reportUnknownVariableType]
    compiled: Callable[..., Any] = torch.compile(plain, dynamic=False)

    def call(*args: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return plain(*args, **named)
        try:
            return compiled(*args, **named)
        except Exception as error:
            raise _in_words(error) or error from error

    model._compiled_call_impl = call  # type: ignore[assignment]  # as model.compile() does it


def set_up_compiler() -> None:
    """For the whole process; raises where there is no compiler."""
    import torch._inductor.config as inductor

    inductor.compile_threads = 1  # before the rest is imported: it would start processes
    inductor.fallback_random = True
    import torch._dynamo.config as dynamo
    import torch._inductor.cpp_builder as builder

    dynamo.recompile_limit = MOST_KINDS
    dynamo.fail_on_recompile_limit_hit = True
    try:
        builder.get_cpp_compiler()
    except Exception as error:
        raise RequestError(
            "train.compile = true needs a C++ compiler, and there is none here. Install one "
            "(apt install g++), or say where it is (CXX=/path/to/g++); or leave train.compile out."
        ) from error
    if builder.run_compile_cmd is not _run_whole:
        _as_it_was.append(builder.run_compile_cmd)
        builder.run_compile_cmd = _run_whole


_as_it_was: list[Callable[..., None]] = []


def _run_whole(cmd_line: str, cwd: str) -> None:
    """What the compiler writes appears whole: a worker may be killed while it compiles, and others
    take what is in the cache for finished."""
    words = shlex.split(cmd_line)
    if words.count("-o") != 1:
        _as_it_was[0](cmd_line, cwd)
        return
    at = words.index("-o") + 1
    target = words[at]
    draft = f"{target}.{os.getpid()}-{threading.get_ident()}"
    words[at] = draft
    _as_it_was[0](shlex.join(words), cwd)
    os.replace(os.path.join(cwd, draft), os.path.join(cwd, target))


def _in_words(error: Exception) -> Exception | None:
    """What became of compiling, if it failed; None: the error is the model's own."""
    from torch._dynamo import exc
    from torch._inductor.exc import InductorError

    if isinstance(error, exc.FailOnRecompileLimitHit):
        return TaskError(
            f"train.compile: the model was called with more than {MOST_KINDS} kinds of input (each "
            "shape is one, and whatever else its code depends on); torch would not compile the "
            "next one. Pad records to a few lengths, or leave train.compile out."
        )
    if isinstance(error, exc.TorchDynamoException | InductorError):
        first = next((line for line in str(error).splitlines() if line.strip()), "")
        return TaskError(
            f"train.compile: torch cannot compile this model: {type(error).__name__}: {first} The "
            "worker's log has all of it. Leave train.compile out to train without."
        )
    return None
