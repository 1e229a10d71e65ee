# SPDX-License-Identifier: Apache-2.0
"""Functions of torch whose bits depend on who made the processor, computed otherwise.

MKL computes sqrt, tan, asin, acos, atan, log2 and log10 (and log, in double precision) from
`rsqrtps` and `rcpps`: instructions that give a first guess of some 12 bits, which each maker of
processors is free to choose. What is refined from them is right but for its last bit, and that is
another one on an Intel than on an AMD; with sqrt, so are the weights of all that Adam trains.
The replacements use what IEEE 754 defines, and functions that do not guess. What else torch takes
from MKL's COMPATIBLE branch is without these instructions (its code was searched for them).

Kernels are replaced for the whole process and for good, below autograd, which stays as it is.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from manyhands.training.compute.replaced_kernels import KernelSet, Replacement
from manyhands.values.errors import RequestError

_SINGLE, _BOTH = (torch.float32,), (torch.float32, torch.float64)
_DOUBLE = (torch.float64,)


def replace_functions(kernels: KernelSet) -> None:
    for name, (dtypes, exact) in _EXACT.items():
        kernels.replace(name, _new(exact, dtypes))
        kernels.replace(f"{name}_", _in_place(exact, dtypes))
        kernels.replace(f"{name}.out", _into(exact, dtypes))
    kernels.replace("pow.Tensor_Scalar", _root(_new(_sqrt, _BOTH)))
    kernels.replace("pow_.Scalar", _root(_in_place(_sqrt, _BOTH)))
    kernels.replace("pow.Tensor_Scalar_out", _root(_into(_sqrt, _BOTH)))
    kernels.replace("_log_softmax", _log_softmax)
    kernels.replace("_log_softmax.out", _log_softmax)
    for name in ("linalg_cholesky_ex", "linalg_cholesky_ex.L", "cholesky", "cholesky.out"):
        kernels.replace(name, _refuse_cholesky)


def _sqrt(x: Tensor) -> Tensor:
    """Correctly rounded, as IEEE 754 has it and every processor does it."""
    found = torch.empty_like(x)
    with np.errstate(all="ignore"):
        np.sqrt(x.detach().numpy(), out=found.numpy())
    return found


def _log(x: Tensor) -> Tensor:
    """In double precision, of which log1p is not MKL's."""
    mantissa, exponent = _parts(x)
    return torch.log1p(mantissa - 1) + exponent * math.log(2)


def _log2(x: Tensor) -> Tensor:
    """In double precision; whole where it is a whole number."""
    mantissa, exponent = _parts(x)
    return torch.log1p(mantissa - 1) * math.log2(math.e) + exponent


def _log10(x: Tensor) -> Tensor:
    """In double precision; whole for the powers of ten, which no product of ours hits by itself."""
    found = _log(x) * math.log10(math.e)
    nearest = found.nan_to_num(posinf=0, neginf=0).round().clamp(-_MOST_TENS, _MOST_TENS)
    is_power = _TENS[(nearest + _MOST_TENS).long()] == x
    return torch.where(is_power, nearest, found)


_MOST_TENS = 307
_TENS = torch.tensor(
    [float(f"1e{k}") for k in range(-_MOST_TENS, _MOST_TENS + 1)], dtype=_DOUBLE[0]
)


def _parts(x: Tensor) -> tuple[Tensor, Tensor]:
    """A mantissa near 1, which is exactly 1 for powers of two, and its exponent."""
    mantissa, exponent = torch.frexp(x)  # from 0.5 to 1
    low = mantissa < math.sqrt(0.5)
    exponent = (exponent - low.to(exponent.dtype)).to(x.dtype)
    return torch.where(low, mantissa * 2, mantissa), exponent


def _log_softmax(
    original: Callable[..., Any], x: Tensor, dim: int, half: bool, *out: Tensor
) -> Any:
    if x.dtype != torch.float64 or x.numel() == 0:
        return original(x, dim, half, *out)
    below = x - x.amax(dim, keepdim=True)
    found = below - _log(below.exp().sum(dim, keepdim=True))
    return put(found, out[0]) if out else found


def _cathetus(x: Tensor) -> Tensor:
    return _sqrt((1 - x) * (1 + x))


# A clone is dense: of what is not, torch computes atan2 one by one, with the C library.
_EXACT: dict[str, tuple[tuple[torch.dtype, ...], Callable[[Tensor], Tensor]]] = {
    "sqrt": (_BOTH, _sqrt),
    "tan": (_BOTH, lambda x: torch.sin(x) / torch.cos(x)),
    "asin": (_BOTH, lambda x: torch.atan2(x.clone(), _cathetus(x))),
    "acos": (_BOTH, lambda x: torch.atan2(_cathetus(x), x.clone())),
    "atan": (_BOTH, lambda x: torch.atan2(x.clone(), torch.ones_like(x))),
    "log2": (_BOTH, lambda x: _log2(x.double()).to(x.dtype)),
    "log10": (_BOTH, lambda x: _log10(x.double()).to(x.dtype)),
    "log": (_DOUBLE, _log),
}


def _dtype(x: Tensor) -> torch.dtype:
    """In which it is computed: whole numbers become floats."""
    whole = not (x.is_floating_point() or x.is_complex())
    return torch.get_default_dtype() if whole else x.dtype


def _new(exact: Callable[[Tensor], Tensor], dtypes: tuple[torch.dtype, ...]) -> Replacement:
    def compute(original: Callable[..., Any], x: Tensor, *rest: Any) -> Any:
        dtype = _dtype(x)
        return exact(x.to(dtype)) if dtype in dtypes else original(x, *rest)

    return compute


def _in_place(exact: Callable[[Tensor], Tensor], dtypes: tuple[torch.dtype, ...]) -> Replacement:
    def compute(original: Callable[..., Any], x: Tensor, *rest: Any) -> Any:
        return x.copy_(exact(x)) if x.dtype in dtypes else original(x, *rest)

    return compute


def _into(exact: Callable[[Tensor], Tensor], dtypes: tuple[torch.dtype, ...]) -> Replacement:
    def compute(original: Callable[..., Any], x: Tensor, *rest: Any) -> Any:
        out: Tensor = rest[-1]
        if _dtype(x) not in dtypes or not out.is_floating_point():
            return original(x, *rest)
        return put(exact(x.to(_dtype(x))), out)

    return compute


def put(found: Tensor, out: Tensor) -> Tensor:
    """As torch does with `out=`."""
    if out.shape != found.shape:
        out.resize_(found.shape)
    return out.copy_(found)


def _root(sqrt: Replacement) -> Replacement:
    """A power; x ** 0.5 is a root."""

    def compute(original: Callable[..., Any], x: Tensor, exponent: Any, *rest: Any) -> Any:
        def power(x: Tensor, *rest: Any) -> Any:
            return original(x, exponent, *rest)

        if not isinstance(exponent, complex) and exponent == 0.5:
            return sqrt(power, x, *rest)
        return power(x, *rest)

    return compute


def _refuse_cholesky(original: Callable[..., Any], x: Tensor, *rest: Any) -> Any:
    if x.dtype in _SINGLE:
        raise RequestError(
            "train.portable: a Cholesky factor in float32 has other bits on other makers' "
            "processors. Compute it in float64: torch.linalg.cholesky(x.double()).float()"
        )
    return original(x, *rest)
