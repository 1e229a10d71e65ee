# SPDX-License-Identifier: Apache-2.0
"""The optimizer's step and its undo log in one pass over memory, where native code can do it.

Being recoverable costs a copy of all that a step changes. As a pass of its own that takes longer
than a fused optimizer's whole step: both wait for memory. Here each stretch is copied aside and
updated while it is in the first cache, block by block, so that the copy is as good as free
(one_pass_update.c, which also says in which order). What follows a block, as an average of the
weights does, follows it there too (followers.py).

It does what torch does, to the bit, or it is not used: before its first use it takes steps beside
torch, on made-up numbers, in each of the ways in which torch's kernels may have been compiled.
Where none gives torch's bits, and for what it does not know, torch takes the step as ever
(sharded_optimizer.py), and what it changes is copied aside before (undo_log.py).

It knows Adam and AdamW if they are fused, and SGD if it is not, on float32 weights. Others take
many passes by themselves, beside which one more costs less. (Adam that is not fused asks MKL for
square roots, which are not always the nearest: nobody else has its bits.)
"""

import ctypes
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from manyhands.training.state import layout
from manyhands.training.state.followers import Follower, native_update
from manyhands.training.state.followers import NativeSpan as _Span
from manyhands.training.state.layout import Bounds, Lanes, Unit
from manyhands.training.state.undo_log import HEAD_WORDS, UndoLog

F32 = torch.float32
optim: Any = torch.optim

_ADAM, _ADAMW, _SGD = range(3)
_SLOTS: dict[type, tuple[str, ...]] = {
    optim.Adam: ("exp_avg", "exp_avg_sq"),
    optim.AdamW: ("exp_avg", "exp_avg_sq"),
    optim.SGD: ("momentum_buffer",),
}
_OTHER_WAYS = ("amsgrad", "maximize", "capturable", "differentiable", "foreach")


class _Undo(ctypes.Structure):
    """As one_pass_update.c has it."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("head", "weight", "first", "second")),
        ("block", ctypes.c_int64),
    )


Numbers = tuple[int, bool, float, float, float, float, float]
"""kind, nesterov, rate, decay, beta1, beta2, eps"""


def numbers(kind: type, group: Mapping[str, Any]) -> Numbers | None:
    """What a step of this group is made of; None: it takes another way than those known here."""
    if any(group.get(way) for way in _OTHER_WAYS) or bool(group.get("fused")) == (
        kind is optim.SGD
    ):
        return None
    if kind is optim.SGD:
        found = [group[name] for name in ("lr", "weight_decay", "momentum", "dampening")]
        return (_SGD, group["nesterov"], *found, 0.0) if _plain(found) else None
    decoupled = kind is optim.AdamW or group.get("decoupled_weight_decay")
    found = [group["lr"], group["weight_decay"], *group["betas"], group["eps"]]
    if not _plain(found) or not 0.5 < found[2] < 1:  # other averages have another formula
        return None
    return (_ADAMW if decoupled else _ADAM, False, *found)


def _plain(found: Sequence[Any]) -> bool:
    return all(isinstance(number, float | int) for number in found)


@dataclass(frozen=True, slots=True)
class Kernel:
    """How this torch's kernels were compiled: elements in a vector, and whether with FMA."""

    update: Any
    width: int
    fma: int

    def __call__(
        self, spans: Any, step: int, undo: _Undo, followers: Sequence[Follower] = ()
    ) -> None:
        count = len(followers)
        passed = (Follower * count)(*followers) if count else None
        how = (self.width, self.fma, passed, count)
        self.update(spans, len(spans), step, ctypes.byref(undo), *how)


def one_pass(
    optimizer: Optimizer, unit: Unit, tensors: Sequence[Tensor], undo_log: UndoLog, rank: int
) -> "OnePassUpdate | None":
    """For this optimizer over this unit, where it can be."""
    kind = type(optimizer)
    if set(unit.bounds) != {F32} or any(tensor.device.type != "cpu" for tensor in tensors):
        return None
    if kind not in _SLOTS or any(numbers(kind, group) is None for group in optimizer.param_groups):
        return None
    kernel = kernel_for(kind)
    return kernel and OnePassUpdate(kernel, optimizer, unit, tensors, undo_log, rank)


class OnePassUpdate:
    """One unit's. Weights, slots and counters are where the undo log keeps them."""

    def __init__(
        self,
        kernel: Kernel,
        optimizer: Optimizer,
        unit: Unit,
        tensors: Sequence[Tensor],
        undo_log: UndoLog,
        rank: int,
    ) -> None:
        self.kernel, self.optimizer, self.unit, self.undo_log = kernel, optimizer, unit, undo_log
        place = {id(p): k for k, g in enumerate(optimizer.param_groups) for p in g["params"]}
        self._groups = [place.get(id(tensor)) for tensor in tensors]
        """None: the optimizer was not given this one, and leaves it as it is."""
        slots = _SLOTS[type(optimizer)]
        self._slots = [undo_log.slots[key, F32] for key in slots if (key, F32) in undo_log.slots]
        self._complete = len(self._slots) == len(slots)
        head, copies, self._bits = undo_log.aside(rank, slots)
        self._undo = _Undo(head.ctypes.data, *_addresses(copies, 3), layout.BLOCK)
        self._spans = (_Span * len(tensors))()
        done, counters = undo_log.done, undo_log.scalars.get("step")
        for entry, span, tensor in zip(self._spans, unit.spans, tensors, strict=True):
            entry.number = layout.block_of(undo_log.layout, span)
            entry.size, entry.weight = span.stop - span.start, tensor.data_ptr()
            entry.done = done.ctypes.data + entry.number * done.itemsize
            if counters is not None:
                entry.counter = counters.data_ptr() + entry.number * counters.element_size()
        self._filled: tuple[int, list[bool], list[Numbers | None]] | None = None

    def take(
        self,
        gradient: Lanes,
        origin: Bounds,
        touched: Sequence[bool],
        step: int,
        followers: Sequence[Follower] = (),
    ) -> bool:
        """Take step `step`, and they follow; False: it is not for us, and nothing was done."""
        kind, start = type(self.optimizer), origin[F32][0] * F32.itemsize
        wanted = (
            gradient[F32].data_ptr() - start,
            [
                touched[span.index] and group is not None
                for span, group in zip(self.unit.spans, self._groups, strict=True)
            ],
            [numbers(kind, group) for group in self.optimizer.param_groups],
        )
        if wanted != self._filled:  # mostly nothing of it changes, or where the gradient lies
            if self._filled is not None and wanted[1:] == self._filled[1:]:
                self._move_to(wanted[0])
                self._filled = wanted
            else:
                self._filled = wanted if self._fill(*wanted) else None
        if self._filled is not None:
            self.kernel(self._spans, step, self._undo, followers)
        return self._filled is not None

    def _move_to(self, base: int) -> None:
        for entry, span in zip(self._spans, self.unit.spans, strict=True):
            if entry.gradient is not None:
                entry.gradient = base + span.start * F32.itemsize

    def _fill(self, base: int, touched: list[bool], of_groups: list[Numbers | None]) -> bool:
        """`base`: where the gradient of the whole lane would begin."""
        exists = self.undo_log.exists
        for k, (entry, span) in enumerate(zip(self._spans, self.unit.spans, strict=True)):
            entry.gradient = base + span.start * F32.itemsize if touched[k] else None
            if not touched[k]:
                continue
            group = self._groups[k]
            if group is None or (found := of_groups[group]) is None:
                return False
            entry.kind, entry.nesterov, entry.rate, entry.decay = found[:4]
            entry.beta1, entry.beta2, entry.eps = found[4:]
            keeps = entry.kind != _SGD or entry.beta1 != 0
            if keeps and not (self._complete and exists[entry.number]):
                return False  # torch makes the slots, in its first step
            slots = [lane[span.start :] for lane in self._slots] if keeps else []
            entry.first, entry.second = _addresses(slots, 2)
            entry.lanes = sum(self._bits[: 1 + len(slots)])
            # Who finishes this for us may have to begin at any of its blocks. (What was made before
            # momentum became 0 is kept, as torch keeps it.)
            first, count = entry.number, -(-entry.size // layout.BLOCK)
            exists[first : first + count] = exists[first]
        return True


def _addresses(tensors: Sequence[Tensor], count: int) -> list[int | None]:
    found: list[int | None] = [tensor.data_ptr() for tensor in tensors]
    return found + [None] * (count - len(found))


# ---- what this torch does


_TRIED: dict[type, list[dict[str, Any]]] = {
    optim.Adam: [{"fused": True, "weight_decay": 0.1}, {"fused": True, "betas": (0.8, 0.95)}],
    optim.AdamW: [{"fused": True, "lr": 0.1}, {"fused": True, "betas": (0.6, 0.9), "eps": 1e-3}],
    optim.SGD: [
        {"lr": 0.1},
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
        {"lr": 0.3, "momentum": 0.8, "dampening": 0.3},
    ],
}
_SIZES = (3, 31, 4096 + 13)


@cache
def kernel_for(kind: type) -> Kernel | None:
    """The way that has the bits of torch's own steps, if there is one."""
    if (native := native_update()) is None or kind not in _TRIED:
        return None
    update, has_fma = native
    ways = [(8, 1), (16, 1)] if has_fma else []
    kernels = [Kernel(update, width, fma) for width, fma in (*ways, (16, 0))]
    for trial in (_Trial(kind, settings) for settings in _TRIED[kind]):
        kernels = [kernel for kernel in kernels if trial.agrees(kernel)]
    return kernels[0] if kernels else None


class _Trial:
    """Three steps of torch's, from and to which states."""

    STEPS = 3

    def __init__(self, kind: type, settings: Mapping[str, Any]) -> None:
        made = torch.Generator().manual_seed(12)
        scales = [torch.randn(size, generator=made, dtype=F32).exp() for size in _SIZES]
        weights = [torch.randn(size, generator=made, dtype=F32).requires_grad_() for size in _SIZES]
        optimizer = kind(weights, **settings)
        of_group = numbers(kind, optimizer.param_groups[0])
        assert of_group is not None
        self.kind, self.numbers = kind, of_group
        self.gradients: list[list[Tensor]] = []
        self.states = [self._state(optimizer, weights)]
        for _ in range(1 + self.STEPS):
            self.gradients.append(
                [torch.randn(len(s), generator=made, dtype=F32) * s for s in scales]
            )
            for weight, gradient in zip(weights, self.gradients[-1], strict=True):
                weight.grad = gradient
            with torch.no_grad():
                inspect.unwrap(kind.step)(optimizer)
            self.states.append(self._state(optimizer, weights))

    def _state(self, optimizer: Optimizer, weights: Sequence[Tensor]) -> list[list[Tensor]]:
        kept = [optimizer.state.get(w, {}) for w in weights]
        keys = [key for key in (*_SLOTS[self.kind], "step") if kept[0].get(key) is not None]
        return [
            [w.detach().clone(), *(of[key].clone() for key in keys)]
            for w, of in zip(weights, kept, strict=True)
        ]

    def agrees(self, kernel: Kernel) -> bool:
        """From the state after torch's first step on, which makes what it keeps."""
        state = [[tensor.clone() for tensor in of] for of in self.states[1]]
        done, head = torch.zeros(1, dtype=torch.int64), torch.zeros(HEAD_WORDS, dtype=torch.int64)
        copies = [torch.empty(max(_SIZES), dtype=F32) for _ in range(3)]
        undo = _Undo(head.data_ptr(), *_addresses(copies, 3), max(_SIZES))  # one block each
        for gradients, expected in zip(self.gradients[1:], self.states[2:], strict=True):
            spans = (_Span * len(state))()
            for span, tensors, gradient in zip(spans, state, gradients, strict=True):
                vectors = [tensor for tensor in tensors if tensor.dim()]
                span.weight, span.first, span.second = _addresses(vectors, 3)
                (span.counter,) = _addresses([tensor for tensor in tensors if not tensor.dim()], 1)
                span.size, span.gradient = len(gradient), gradient.data_ptr()
                span.done = done.data_ptr()
                span.kind, span.nesterov, span.rate, span.decay = self.numbers[:4]
                span.beta1, span.beta2, span.eps = self.numbers[4:]
            kernel(spans, 0, undo)
            if not all(_same(a, b) for a, b in _pairs(state, expected)):
                return False
        return True


def _pairs(left: list[list[Tensor]], right: list[list[Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    for some, others in zip(left, right, strict=True):
        yield from zip(some, others, strict=True)


def _same(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left.view(torch.int32), right.view(torch.int32))
