# SPDX-License-Identifier: Apache-2.0
"""What follows a block of weights in the native pass that updates it, while it is in the cache.

As a pass of its own, an average of the weights or a copy of them waits for memory that the step
has just had in its hands. So whoever wants each block after a step may send a `Follower` along with
the optimizer's pass (one_pass_update.py); where that pass is not taken, or this module says that
it cannot be, the same is done afterwards, by torch.

An average has torch's bits, or it does not follow: before its first use it is tried beside
`torch.lerp`, with and without FMA.
"""

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from manyhands.training.state.layout import Unit
from manyhands.training.state.undo_log import HEAD_WORDS
from manyhands.values.native_library import native_library

F32 = torch.float32


class NativeSpan(ctypes.Structure):
    """As one_pass_update.c has it, and so the next."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "first", "second", "gradient")),
        *((name, ctypes.c_void_p) for name in ("counter", "done")),
        *((name, ctypes.c_int64) for name in ("number", "size", "lanes", "kind", "nesterov")),
        *((name, ctypes.c_double) for name in ("rate", "decay", "beta1", "beta2", "eps")),
    )


class Follower(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weights", "lane", "head", "aside", "words")),
        *((name, ctypes.c_int64) for name in ("before", "after")),
        ("part", ctypes.c_double),
        *((name, ctypes.c_int64) for name in ("begins", "fma")),
    )


def copying(weights: Tensor, lane: Tensor) -> Follower:
    """Each block of the lane `weights` is copied to the same place of `lane`."""
    return Follower(weights=weights.data_ptr(), lane=lane.data_ptr())


def can_follow(unit: Unit) -> bool:
    """Whether a native pass over this unit, if there is one, can be followed."""
    return set(unit.bounds) == {F32}


@cache
def native_update() -> tuple[Any, bool] | None:
    """The native pass, and whether this processor has FMA."""
    if (library := native_library()) is None:
        return None
    update = library.update
    update.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 2, ctypes.c_void_p]
    update.argtypes += [*[ctypes.c_int64] * 2, ctypes.c_void_p, ctypes.c_int64]
    update.restype = None
    return update, bool(library.has_fma())


@cache
def lerp_fma() -> int | None:
    """Whether this torch's lerp is made of FMAs; None: it has bits that nobody else has."""
    if (native := native_update()) is None:
        return None
    update, has_fma = native
    ways = (1, 0) if has_fma else (0,)
    return next((fma for fma in ways if all(_agrees(update, fma, p) for p in _PARTS)), None)


_PARTS = (1e-4, 0.1, 0.3, 1 / 3, 0.5, 0.9)
_SIZES = (3, 31, 4096 + 13)


def _agrees(update: Any, fma: int, part: float) -> bool:
    made = torch.Generator().manual_seed(21)
    for size in _SIZES:
        weights = torch.randn(size, generator=made, dtype=F32)
        lane = torch.randn(size, generator=made, dtype=F32) * weights.exp()
        expected = torch.lerp(lane, weights, part)
        words, head = torch.zeros(2, HEAD_WORDS, dtype=torch.int64)
        aside, done = torch.zeros_like(lane), torch.zeros(1, dtype=torch.int64)
        span = NativeSpan(weight=weights.data_ptr(), done=done.data_ptr(), size=size)
        undo = (ctypes.c_int64 * 5)(0, 0, 0, 0, size)  # nothing is updated: one block
        follower = Follower(
            *(tensor.data_ptr() for tensor in (weights, lane, head, aside, words)),
            after=1,
            part=part,
            fma=fma,
        )
        addresses = [ctypes.addressof(struct) for struct in (span, undo, follower)]
        update(addresses[0], 1, 0, addresses[1], 16, 0, addresses[2], 1)
        if not torch.equal(lane.view(torch.int32), expected.view(torch.int32)):
            return False
    return True
