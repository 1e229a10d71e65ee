# SPDX-License-Identifier: Apache-2.0
"""Which kernels this process computes with: marks of small computations, and fixing them.

A mark is the start of a SHA-256 over the bits of fixed computations, of awkward sizes, so that
vectors have a rest. Nothing random is drawn, so nothing is changed for those who draw later. It
costs some 20 ms, much of which the first step would have taken: libraries look at the processor and
compile kernels when they are first used. Not all kernels are tried; those that are tell makes of
processors apart.

Torch, oneDNN and MKL choose kernels when they first compute. `fix_kernels` must come before that; a
forked worker is in time, because its agent has imported torch and computed nothing.
"""

import ctypes
import hashlib
import platform
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from manyhands.training.compute.compiler_mark import compiler_here, digest_of
from manyhands.training.compute.portable_functions import replace_functions
from manyhands.training.compute.portable_products import replace_products
from manyhands.training.compute.replaced_kernels import KernelSet
from manyhands.values.environment import PORTABLE, variables
from manyhands.values.errors import RequestError
from manyhands.values.kernels import COMPILED, Kernels
from manyhands.values.machine import processor

_LETTERS = 12
_MKL_BRANCH, _COMPATIBLE = 1, 3
"""MKL_CBWR_BRANCH and MKL_CBWR_COMPATIBLE of mkl_types.h"""


def kernels_here(*, portable: bool, precision: str, compiles: bool = False) -> Kernels:
    """Of this process, as it computes now. In half precision also those of that, which kill
    processes on machines that announce instructions they do not allow; so only where they are going
    to be used. With `compiles` also who makes kernels here (compiler_mark.py)."""
    trials = dict(_TRIALS)
    if precision in _IN_HALF:
        trials[precision] = _IN_HALF[precision]
    with torch.enable_grad():
        marks = {kind: _mark(trial()) for kind, trial in trials.items()}
    compiler = compiler_here() if compiles else ""
    if compiler:
        marks[COMPILED] = digest_of(compiler)
    capability = torch.backends.cpu.get_cpu_capability()
    return Kernels(processor(), capability, str(torch.__version__), marks, portable, compiler)


_fixed: list[KernelSet] = []


def fix_kernels() -> None:
    """Compute with what every x86-64-v3 processor has, from now on; raises where that fails.

    The environment is as before afterwards: processes started from here choose for themselves.
    """
    if _fixed:
        return
    with variables(PORTABLE):
        for compute in (_products, _convolutions):
            compute()  # now each library has chosen
    if (problem := _not_fixed()) is not None:
        raise RequestError(f"train.portable: {problem}")
    kernels = KernelSet()
    replace_functions(kernels)
    replace_products(kernels)
    _fixed.append(kernels)


def _not_fixed() -> str | None:
    if platform.machine() != "x86_64":
        return f"it fixes the kernels of x86-64-v3 processors, and this one is {processor()}."
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return "this torch was built without MKL or oneDNN; use one from PyPI."
    if not KernelSet.possible():
        return f"torch {torch.__version__} has no torch.library.get_kernel; install a newer one."
    capability = torch.backends.cpu.get_cpu_capability()
    if capability in ("DEFAULT", "NO AVX"):
        return f"{processor()} has no AVX2 and FMA (x86-64-v3)."
    if capability != PORTABLE["ATEN_CPU_CAPABILITY"].upper() or mkl_branch() != _COMPATIBLE:
        set_before = " ".join(f"{name}={value}" for name, value in PORTABLE.items())
        return (
            "torch has computed in this process already, with other kernels. Train in processes "
            f"of their own (--engine local), or start Python with {set_before}"
        )
    return None


def mkl_branch() -> int | None:
    """What MKL_CBWR came to; None where that cannot be asked."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        return int(ctypes.CDLL(str(library)).mkl_serv_cbwr_get(_MKL_BRANCH))
    except (OSError, AttributeError):
        return None


def _mark(results: Iterable[Tensor]) -> str:
    found = hashlib.sha256()
    for result in results:
        found.update(result.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:_LETTERS]


def _numbers(seed: int, *shape: int) -> Tensor:
    """Between -1 and 1, of both signs, and with all the digits that float32 has, so that every sum
    of products is rounded; no generator is asked."""
    count = 1
    for size in shape:
        count *= size
    whole = (torch.arange(count) * 7919 + seed * 104729) % 1009 - 504
    return (whole.to(torch.float32) / 509).view(shape)


def _products() -> list[Tensor]:
    a, b = _numbers(1, 37, 129), _numbers(2, 129, 53)
    return [
        a @ b,
        _numbers(3, 101, 257) @ _numbers(4, 257),
        torch.bmm(_numbers(5, 3, 17, 33), _numbers(6, 3, 33, 9)),
        torch.addmm(_numbers(7, 53), a, b),
        _numbers(15, 71, 131) @ _numbers(16, 131, 73),  # large, if portable
    ]


def _convolutions() -> list[Tensor]:
    x = _numbers(8, 5, 7, 13, 11).requires_grad_()
    weight = _numbers(9, 6, 7, 3, 3).requires_grad_()
    out = F.conv2d(x, weight, padding=1)
    return [out, *torch.autograd.grad(out.square().sum(), (x, weight))]


def _functions() -> list[Tensor]:
    x = _numbers(10, 1009) * 8
    above = x.abs() + 0.01
    row = x.view(1, -1)
    return [
        *(f(x) for f in (torch.exp, torch.tanh, torch.sigmoid, torch.erf, torch.sin, F.gelu)),
        *(f(above) for f in (torch.log, torch.sqrt, torch.rsqrt)),
        row.softmax(1),
        row.log_softmax(1),
    ]


def _sums() -> list[Tensor]:
    x = _numbers(11, 19, 1009)
    query, key, value = (_numbers(k, 1, 2, 33, 16) for k in (12, 13, 14))
    return [
        x.sum().view(1),
        x.mean(0),
        x.var(1),
        F.layer_norm(x, (1009,)),
        F.scaled_dot_product_attention(query, key, value),
    ]


def _bf16() -> list[Tensor]:
    a, b = _numbers(1, 37, 129), _numbers(2, 129, 53)
    return [a.bfloat16() @ b.bfloat16()]


def _fp16() -> list[Tensor]:
    a, b = _numbers(1, 37, 129), _numbers(2, 129, 53)
    return [a.half() @ b.half()]


_IN_HALF = {"bf16": _bf16, "fp16": _fp16}


_TRIALS: dict[str, Callable[[], list[Tensor]]] = {
    "products": _products,
    "convolutions": _convolutions,
    "functions": _functions,
    "sums": _sums,
}
