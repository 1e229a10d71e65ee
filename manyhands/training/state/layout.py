# SPDX-License-Identifier: Apache-2.0
"""A model is one flat vector: where each tensor of a module lives in it.

A `Layout` is pure description, equal on every worker that built the same model (its `digest` says
so). There is one lane per dtype. In a lane the parameters that can receive gradients come first,
then the frozen ones; each starts at a multiple of 64 bytes and of 16 elements and keeps its
strides. A tensor that is used under several names is one piece with aliases.

Work on the vector is shared out in **blocks**: a block is up to BLOCK elements of one piece,
counted from the piece's start. Blocks never cross a piece, so a block's norm, and an element-wise
optimizer's kernel over it, give the same bits whichever worker owns it.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from manyhands.training.state.module_paths import modules_of
from manyhands.values.errors import TaskError
from manyhands.values.plain_names import plain_name

BLOCK = 16384
"""Elements. A multiple of 16 (vector kernels round differently in their scalar tails)."""

UNIT = 32 * BLOCK
"""Elements that are updated in one go: small enough for what is copied aside to stay in a cache,
large enough for the calls not to cost more than the work."""


Lanes = dict[torch.dtype, Tensor]
"""A flat vector: one tensor per dtype."""

Bounds = dict[torch.dtype, tuple[int, int]]
"""A stretch of each lane."""


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """One parameter or buffer in its lane."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int
    trainable: bool
    aliases: tuple[str, ...] = ()

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def stop(self) -> int:
        return self.start + self.numel

    def view(self, lane: Tensor) -> Tensor:
        """This tensor as it lives in `lane`."""
        return lane.as_strided(self.shape, self.stride, lane.storage_offset() + self.start)


@dataclass(frozen=True)
class Layout:
    pieces: tuple[TensorPlace, ...]
    sizes: dict[torch.dtype, int]
    """Elements of each lane."""
    trainable_sizes: dict[torch.dtype, int]
    """Elements of each lane up to the end of its last trainable piece."""

    @cached_property
    def trainable(self) -> tuple[TensorPlace, ...]:
        return tuple(p for p in self.pieces if p.trainable)

    @cached_property
    def first_blocks(self) -> tuple[int, ...]:
        """Blocks are numbered through all trainable pieces: the number of each piece's first."""
        counts = [-(-p.numel // BLOCK) for p in self.trainable]
        return tuple(accumulate(counts, initial=0))

    def spans_of(self, first: int, stop: int) -> list[tuple[TensorPlace, int, int]]:
        """The blocks [first, stop), as (piece, start, stop) in its lane."""
        found: list[tuple[TensorPlace, int, int]] = []
        for piece, (a, b) in zip(self.trainable, pairwise(self.first_blocks), strict=True):
            low, high = max(a, first), min(b, stop)
            if low < high:
                end = min(piece.stop, piece.start + (high - a) * BLOCK)
                found.append((piece, piece.start + (low - a) * BLOCK, end))
        return found

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(repr(self.pieces).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a trainable piece: [start, stop) in its lane. `whole` when it is all of it."""

    piece: TensorPlace
    index: int
    """Of the piece among the trainable ones."""
    start: int
    stop: int

    @property
    def whole(self) -> bool:
        return (self.start, self.stop) == (self.piece.start, self.piece.stop)

    @property
    def offset(self) -> int:
        """Where it begins in its own tensor's memory."""
        return self.start - self.piece.start


@dataclass(frozen=True)
class Unit:
    """Neighbouring spans that are updated together: wholly, or (after a crash) not at all."""

    spans: tuple[Span, ...]
    blocks: tuple[int, int]
    """[first, stop) in the numbering of `Layout.first_blocks`."""

    @cached_property
    def bounds(self) -> dict[torch.dtype, tuple[int, int]]:
        return bounds(self.spans)


def lay_out(named: Sequence[tuple[str, Tensor, bool]]) -> Layout:
    """Place tensors, given as (name, tensor, trainable), in lanes. Equal objects are aliases."""
    first_names: dict[int, str] = {}
    aliases: dict[str, list[str]] = {}
    tensors: list[tuple[str, Tensor, bool]] = []
    for name, tensor, trainable in named:
        if id(tensor) in first_names:
            aliases.setdefault(first_names[id(tensor)], []).append(name)
            continue
        first_names[id(tensor)] = name
        tensors.append((name, tensor, trainable))
    _refuse_overlaps(tensors)
    ends: dict[torch.dtype, int] = {}
    trainable_ends: dict[torch.dtype, int] = {}
    pieces: list[TensorPlace] = []
    for name, tensor, trainable in sorted(tensors, key=lambda t: not t[2]):
        dtype = tensor.dtype
        align = max(16, 64 // dtype.itemsize)
        start = -(-ends.get(dtype, 0) // align) * align
        stride = tensor.stride() if _dense(tensor) else torch.empty(tensor.shape).stride()
        piece = TensorPlace(
            name, dtype, tuple(tensor.shape), stride, start, trainable, (*aliases.get(name, ()),)
        )
        pieces.append(piece)
        ends[dtype] = piece.stop
        if trainable:
            trainable_ends[dtype] = piece.stop
    sizes = {dtype: -(-end // 64) * 64 for dtype, end in ends.items()}
    return Layout(tuple(pieces), sizes, trainable_ends)


def parameters_of(model: Module) -> list[tuple[str, Tensor, bool]]:
    return [
        (plain_name(name), p, p.requires_grad)
        for name, p in model.named_parameters(remove_duplicate=False)
    ]


def buffers_of(model: Module) -> list[tuple[str, Tensor, bool]]:
    named = model.named_buffers(remove_duplicate=False)
    return [(plain_name(name), b, False) for name, b in named]


def share_out(layout: Layout, workers: int, *, cut: str) -> list[list[Span]]:
    """Which spans of the trainable pieces each worker owns: contiguous, near equal in elements.

    `cut` says where a worker's part may end: "blocks" (element-wise optimizers), "pieces" (those
    that look at a whole tensor), or "nowhere" (all of it to one worker).
    """
    units: list[Span] = []
    for index, piece in enumerate(layout.trainable):
        step = BLOCK if cut == "blocks" else max(1, piece.numel)
        for start in range(piece.start, piece.stop, step):
            units.append(Span(piece, index, start, min(start + step, piece.stop)))
    total = sum(u.stop - u.start for u in units)
    owners: list[list[Span]] = [[] for _ in range(workers)]
    done = 0
    for unit in units:
        middle = done + (unit.stop - unit.start) / 2
        owner = 0 if cut == "nowhere" else min(workers - 1, int(middle * workers / max(1, total)))
        spans = owners[owner]
        if spans and spans[-1].piece is unit.piece:
            spans[-1] = Span(unit.piece, unit.index, spans[-1].start, unit.stop)
        else:
            spans.append(unit)
        done += unit.stop - unit.start
    return owners


def most_shares(layout: Layout, *, cut: str) -> int | None:
    """With more of them somebody gets nothing; None: one has all of it, however many there are."""
    match cut:
        case "blocks":
            return max(1, layout.first_blocks[-1])
        case "pieces":
            return max(1, sum(p.numel > 0 for p in layout.trainable))
        case _:
            return None


def units(layout: Layout, spans: Sequence[Span], *, cut: str) -> list[Unit]:
    """A worker's spans in units of about equal size, none larger than UNIT where it can be cut."""
    total = sum(s.stop - s.start for s in spans)
    count = 1 if cut == "nowhere" else max(1, -(-total // UNIT))
    size = -(-total // (count * BLOCK)) * BLOCK
    found: list[list[Span]] = []
    room = 0
    for span in spans:
        start = span.start
        while start < span.stop:
            if room <= 0:
                found.append([])
                room = size if cut != "nowhere" else total
            stop = (
                min(span.stop, start + -(-room // BLOCK) * BLOCK) if cut == "blocks" else span.stop
            )
            found[-1].append(Span(span.piece, span.index, start, stop))
            room -= stop - start
            start = stop
    return [Unit(tuple(u), _block_range(layout, u)) for u in found]


def rest_of(layout: Layout, unit: Unit, done: NDArray[np.int64], step: int) -> Unit | None:
    """What of a unit has not been through step `step`: it is updated from its start, and some of
    its blocks may be through already (undo_log.py)."""
    left: list[Span] = []
    for span in unit.spans:
        first, last = block_of(layout, span), block_of(layout, span, last=True)
        through = int((done[first : last + 1] > step).sum())
        if through <= last - first:
            start = span.start + through * BLOCK
            left.append(Span(span.piece, span.index, start, span.stop))
    return Unit(tuple(left), _block_range(layout, left)) if left else None


def _block_range(layout: Layout, spans: Sequence[Span]) -> tuple[int, int]:
    return block_of(layout, spans[0]), block_of(layout, spans[-1], last=True) + 1


def block_of(layout: Layout, span: Span, *, last: bool = False) -> int:
    """The number of a span's first (or last) block."""
    element = span.stop - 1 - span.piece.start if last else span.offset
    return layout.first_blocks[span.index] + element // BLOCK


def bounds(spans: Sequence[Span]) -> dict[torch.dtype, tuple[int, int]]:
    """The stretch of each lane that these spans cover (with the padding between pieces)."""
    covered: dict[torch.dtype, tuple[int, int]] = {}
    for span in spans:
        start, stop = covered.get(span.piece.dtype, (span.start, span.stop))
        covered[span.piece.dtype] = (min(start, span.start), max(stop, span.stop))
    return covered


def blocks(spans: Sequence[Span]) -> list[tuple[Span, int, int]]:
    """The blocks inside these spans, as (span, start, stop) in the lane."""
    return [
        (span, start, min(start + BLOCK, span.stop))
        for span in spans
        for start in range(span.start, span.stop, BLOCK)
    ]


def _dense(tensor: Tensor) -> bool:
    """Whether the elements fill one stretch of memory, in any order of dimensions."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda x: x[1]):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _refuse_overlaps(tensors: Sequence[tuple[str, Tensor, bool]]) -> None:
    """Two Parameters over the same memory would be updated twice; say how to tie them instead."""
    stretches = sorted(
        (
            (t.data_ptr(), t.data_ptr() + _extent(t) * t.element_size(), name, t)
            for name, t, _ in tensors
            if t.numel()
        ),
        key=lambda s: s[:3],
    )
    for k, (_, stop, name, tensor) in enumerate(stretches):
        for start, _, other, second in stretches[k + 1 :]:
            if start >= stop:
                break
            if _share(tensor, second):
                raise TaskError(
                    f"the tensors '{name}' and '{other}' of the model share memory but are "
                    "different objects. Tie them by assigning the Parameter (or the buffer) "
                    f"itself: b.{other.split('.')[-1]} = a.{name.split('.')[-1]}."
                )


def _extent(tensor: Tensor) -> int:
    """How many elements lie between the first and the last of it, both included."""
    sides = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in sides)


def _share(a: Tensor, b: Tensor) -> bool:
    """Whether an element of one, whose stretches of memory intersect, is one of the other."""
    if (_dense(a) and _dense(b)) or a.element_size() != b.element_size():
        return True
    first = min(a.data_ptr(), b.data_ptr())
    starts = [(t.data_ptr() - first) // t.element_size() for t in (a, b)]
    places = torch.arange(max(s + _extent(t) for s, t in zip(starts, (a, b), strict=True)))
    mine, theirs = (
        places.as_strided(t.shape, t.stride(), s).reshape(-1)
        for s, t in zip(starts, (a, b), strict=True)
    )
    return bool(torch.isin(mine, theirs).any())


def refuse_second_views(model: Module, optimizer: Optimizer) -> None:
    """A second tensor over a parameter's memory would stay behind when the parameter moves into
    the flat vector, and show old weights for ever."""
    owners: dict[int, str] = {}
    for name, parameter, _ in parameters_of(model):
        if parameter.numel():
            owners[parameter.untyped_storage().data_ptr()] = name
    held: list[tuple[str, Any]] = [(f"buffer '{n}'", b) for n, b, _ in buffers_of(model)]
    for path, module in modules_of(model):
        own = {n for n, _ in module.named_parameters(recurse=False)}
        held += [
            (f"attribute '{f'{path}.' * bool(path)}{name}'", value)
            for name, value in vars(module).items()
            if f"{name}_orig" not in own  # spectral_norm's: made anew before it is used
        ]
    held += [(f"the optimizer's '{name}'", value) for name, value in vars(optimizer).items()]
    for where, value in held:
        for tensor in value if isinstance(value, list | tuple) else (value,):  # pyright: ignore[reportUnknownVariableType]
            if not isinstance(tensor, Tensor) or isinstance(tensor, Parameter) or tensor.is_meta:
                continue
            if tensor.numel() and (at := tensor.untyped_storage().data_ptr()) in owners:
                raise TaskError(
                    f"{where} is a second view of the memory of parameter '{owners[at]}'. It would "
                    "not follow the parameter's updates. Use the parameter itself, or a clone()."
                )
