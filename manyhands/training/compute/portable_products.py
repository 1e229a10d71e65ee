# SPDX-License-Identifier: Apache-2.0
"""Large matrix products of float32 by oneDNN, which at AVX2 is two to four times as fast as the
COMPATIBLE branch of MKL, and has the same bits on every x86-64-v3 processor too: it cuts sums at
fixed places (every 1,024 terms), not where the caches of a processor suggest.

Small products stay with MKL: a call of oneDNN takes some 30 µs before it computes anything. What is
large follows from the shapes alone. Products inside other kernels (attention, some convolutions)
are MKL's, too.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from manyhands.training.compute.portable_functions import put
from manyhands.training.compute.replaced_kernels import KernelSet

LARGE = 1 << 19
"""Multiplications, from which on a product is computed by oneDNN."""


def replace_products(kernels: KernelSet) -> None:
    kernels.replace("mm", _mm)
    kernels.replace("mm.out", _mm_out)
    kernels.replace("addmm", _addmm)
    kernels.replace("addmm.out", _addmm_out)
    kernels.replace("addmm_", _addmm_)
    kernels.replace("bmm", _bmm)
    kernels.replace("bmm.out", _bmm_out)


def _large(a: Tensor, b: Tensor, dims: int = 2) -> bool:
    if not a.dim() == b.dim() == dims:
        return False  # torch says what is wrong
    single = a.dtype == b.dtype == torch.float32
    plain = a.layout == b.layout == torch.strided
    if not (single and plain and a.shape[-1] == b.shape[-2]):
        return False  # torch says what is wrong
    return a.shape[-2] * a.shape[-1] * b.shape[-1] >= LARGE


def _product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    found = torch.ops.mkldnn._linear_pointwise(_dense(a), _dense(b.t()), bias, "none", [], "")
    return found


def _dense(matrix: Tensor) -> Tensor:
    """Rows or columns lie one after the other; not so in what was expanded."""
    rows, columns = matrix.shape
    down, across = matrix.stride()
    by_rows = across == 1 and down >= columns
    by_columns = down == 1 and across >= rows
    return matrix if by_rows or by_columns else matrix.contiguous()


def _mm(original: Callable[..., Any], a: Tensor, b: Tensor) -> Any:
    return _product(a, b) if _large(a, b) else original(a, b)


def _mm_out(original: Callable[..., Any], a: Tensor, b: Tensor, out: Tensor) -> Any:
    if not _large(a, b) or out.dtype != torch.float32:
        return original(a, b, out)
    return put(_product(a, b), out)


def _sum(base: Tensor, a: Tensor, b: Tensor, beta: Any, alpha: Any) -> Tensor:
    """beta * base + alpha * (a @ b)"""
    if base.dim() == 1 and base.shape[0] == b.shape[1] and beta == alpha == 1:
        return _product(a, b, base.contiguous())
    found = _product(a, b)
    if alpha != 1:
        found.mul_(alpha)
    if beta != 0:  # what is multiplied by 0 may be anything, NaN too
        found.add_(base, alpha=beta)
    return found


def _adds(base: Tensor, a: Tensor, b: Tensor) -> bool:
    return _large(a, b) and base.dtype == torch.float32


def _addmm(
    original: Callable[..., Any], base: Tensor, a: Tensor, b: Tensor, beta: Any, alpha: Any
) -> Any:
    if not _adds(base, a, b):
        return original(base, a, b, beta, alpha)
    return _sum(base, a, b, beta, alpha)


def _addmm_out(
    original: Callable[..., Any],
    base: Tensor,
    a: Tensor,
    b: Tensor,
    beta: Any,
    alpha: Any,
    out: Tensor,
) -> Any:
    if not _adds(base, a, b) or out.dtype != torch.float32:
        return original(base, a, b, beta, alpha, out)
    return put(_sum(base, a, b, beta, alpha), out)


def _addmm_(
    original: Callable[..., Any], base: Tensor, a: Tensor, b: Tensor, beta: Any, alpha: Any
) -> Any:
    if not _adds(base, a, b):
        return original(base, a, b, beta, alpha)
    return base.copy_(_sum(base, a, b, beta, alpha))


def _bmm(original: Callable[..., Any], a: Tensor, b: Tensor) -> Any:
    if not _large(a, b, 3) or a.shape[0] != b.shape[0]:
        return original(a, b)
    found = a.new_empty(a.shape[0], a.shape[1], b.shape[2])
    return _fill(found, a, b)


def _bmm_out(original: Callable[..., Any], a: Tensor, b: Tensor, out: Tensor) -> Any:
    if not _large(a, b, 3) or a.shape[0] != b.shape[0] or out.dtype != torch.float32:
        return original(a, b, out)
    return put(_bmm(original, a, b), out)


def _fill(found: Tensor, a: Tensor, b: Tensor) -> Tensor:
    for one, left, right in zip(found, a, b, strict=True):
        one.copy_(_product(left, right))
    return found
