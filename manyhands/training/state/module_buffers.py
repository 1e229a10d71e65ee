# SPDX-License-Identifier: Apache-2.0
"""Buffers of a model (running statistics and the like), merged so that workers do not show.

During a micro-batch the buffers are private to the worker and start from the step's committed
values. Afterwards the micro-batches' outcomes are merged **in index order**, by three rules:

1. BatchNorm's update is affine: r ← (1-m)^c r + rest, where `rest` is what c calls would leave if
   r were 0. So training BatchNorms start each micro-batch from 0, and the M updates are applied
   one after the other, as one process would have.
2. Another float buffer: what all micro-batches agree on bit for bit is taken as it is; otherwise
   the committed value plus the weighted mean of the differences, in float64.
3. An integer or bool buffer must come out equal in all micro-batches; otherwise the run stops and
   names it.

A step of a single micro-batch takes its outcome as it is: that is plain PyTorch.

Factors of rows (max_norm_rows.py) are no buffers of the model, but travel as if they were. They
start each micro-batch as 1, and the smallest counts.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

from manyhands.training.state.layout import Layout, TensorPlace, buffers_of, lay_out
from manyhands.training.state.max_norm_rows import find_max_norms
from manyhands.training.state.module_paths import module_at, modules_of
from manyhands.values.errors import TaskError, UnevenBuffer

StatisticsRow = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Norm:
    """One BatchNorm that keeps running statistics, and where they are in the flat buffers."""

    module: _BatchNorm
    mean: TensorPlace
    var: TensorPlace
    count: TensorPlace


class ModuleBuffers:
    """The buffers of one replica. `committed` holds the step's values, one flat lane per dtype.

    The module's own buffers are views of `private`. Outcomes travel as float64 rows: for each
    micro-batch `row_width` numbers, which hold the BatchNorm statistics and one flag per other
    buffer that says whether it changed; those that did are gathered separately (`changed_width`).
    """

    def __init__(self, model: Module, carried: Mapping[str, Tensor] | None = None) -> None:
        """`carried`: what is no buffer of the model, and is kept and passed on as if it were."""
        self.model, self._carried = model, dict(carried or {})
        self.rows = {f"{rows.name} rows": rows for rows in find_max_norms(model)}
        named = buffers_of(model)
        named += [(name, rows.factors, False) for name, rows in self.rows.items()]
        named += [(name, tensor, False) for name, tensor in self._carried.items()]
        self.layout: Layout = lay_out(named)
        self.committed = {
            dtype: torch.zeros(size, dtype=dtype) for dtype, size in self.layout.sizes.items()
        }
        self.private = {d: lane.to(_device(model), copy=True) for d, lane in self.committed.items()}
        self._slots = self._adopt(dict((name, t) for name, t, _ in named))
        self._named = self._known_names(named)
        self.norms = self._norms()
        in_norms = {p.name for n in self.norms for p in (n.mean, n.var, n.count)}
        self.others = [p for p in self.layout.pieces if p.name not in in_norms]
        self._widths = [n.mean.numel for n in self.norms]
        self.row_width = sum(2 * w + 1 for w in self._widths) + len(self.others)

    def _adopt(self, tensors: dict[str, Tensor]) -> list[tuple[Module, str, TensorPlace, Tensor]]:
        """Move the module's buffers into `private`; remember where each hangs, by every name."""
        slots: list[tuple[Module, str, TensorPlace, Tensor]] = []
        for piece in self.layout.pieces:
            piece.view(self.committed[piece.dtype]).copy_(tensors[piece.name])
            tensor = tensors[piece.name]
            tensor.data = piece.view(self.private[piece.dtype])
            tensor.copy_(piece.view(self.committed[piece.dtype]))
            if piece.name in self.rows or piece.name in self._carried:
                continue
            for name in (piece.name, *piece.aliases):
                path, _, leaf = name.rpartition(".")
                slots.append((module_at(self.model, path), leaf, piece, tensor))
        return slots

    def _known_names(
        self, named: Sequence[tuple[str, Tensor, bool]]
    ) -> list[tuple[str, Module, frozenset[str]]]:
        """Every module that could get a buffer later, and the buffers that it has."""
        known = {name for name, _, _ in named}
        return [
            (path, module, frozenset(n for n in module._buffers if _join(path, n) in known))  # pyright: ignore[reportPrivateUsage]
            for path, module in modules_of(self.model)
        ]

    def _norms(self) -> list[Norm]:
        by_name = {name: p for p in self.layout.pieces for name in (p.name, *p.aliases)}
        found: list[Norm] = []
        for path, module in modules_of(self.model):
            if not isinstance(module, _BatchNorm) or module.running_mean is None:
                continue
            if type(module).forward is not _BatchNorm.forward or not module.track_running_stats:
                continue
            dot = f"{path}." if path else ""
            names = ("running_mean", "running_var", "num_batches_tracked")
            found.append(Norm(module, *(by_name[dot + name] for name in names)))
        return found

    def begin(self, alone: bool) -> None:
        """Before a micro-batch: private values are the committed ones. `alone`: no others in it."""
        for dtype, lane in self.committed.items():
            self.private[dtype].copy_(lane)
        if not alone:
            for norm in self.norms:
                if norm.module.training:
                    for piece in (norm.mean, norm.var, norm.count):
                        piece.view(self.private[piece.dtype]).zero_()
        for rows in self.rows.values():
            rows.factors.fill_(1.0)
            rows.recording = True

    def end(self, row: StatisticsRow) -> None:
        """After a micro-batch: write its outcome into `row` (which is all zeros)."""
        self._reinstate()
        self._stop_recording()
        at = 0
        for norm, width in zip(self.norms, self._widths, strict=True):
            if norm.module.training:
                row[at : at + width] = self._value(norm.mean).double().numpy()
                row[at + width : at + 2 * width] = self._value(norm.var).double().numpy()
                row[at + 2 * width] = self._value(norm.count).item()
            at += 2 * width + 1
        for k, piece in enumerate(self.others):
            row[at + k] = not _same_bits(self._value(piece), self._committed(piece))

    def changed(self, rows: NDArray[np.float64]) -> list[TensorPlace]:
        """The other buffers that changed in any micro-batch of the step, from all its rows."""
        flags = rows[:, self.row_width - len(self.others) :]
        return [p for k, p in enumerate(self.others) if flags[:, k].any()]

    def written(self) -> list[str]:
        """Names of buffers, and of tables with `max_norm`, that are not as `begin` left them."""
        self._reinstate()
        self._stop_recording()
        names = [p.name for p in self.layout.pieces if p.name not in self.rows]
        by_name = {p.name: p for p in self.layout.pieces}
        found = [
            n for n in names if not _same_bits(self._value(by_name[n]), self._committed(by_name[n]))
        ]
        return found + [r.name for r in self.rows.values() if bool((r.factors != 1.0).any())]

    def outcome(self) -> dict[str, Tensor]:
        """Private values of all other buffers after a micro-batch, to be kept until the merge."""
        return {p.name: self._value(p).clone() for p in self.others}

    def values(self) -> dict[str, Tensor]:
        """Private values of all buffers as they are now."""
        return {p.name: self._value(p) for p in self.layout.pieces}

    def commit_alone(self) -> None:
        """What the module holds now counts: after a step of one micro-batch, computed here, and
        after an optimizer whose hooks may have changed it."""
        self._reinstate()
        for dtype, lane in self.private.items():
            self.committed[dtype].copy_(lane)

    def commit_norms(self, rows: NDArray[np.float64]) -> None:
        at = 0
        for norm, width in zip(self.norms, self._widths, strict=True):
            self._apply(norm, rows[:, at : at + 2 * width + 1], width)
            at += 2 * width + 1

    def _apply(self, norm: Norm, rows: NDArray[np.float64], width: int) -> None:
        seen = int(self._committed(norm.count).item())
        for piece, column in ((norm.mean, 0), (norm.var, width)):
            value, count = self._committed(piece), seen
            for row in rows:
                calls = int(row[-1])
                if calls == 0:
                    continue
                rest = torch.from_numpy(row[column : column + width]).to(piece.dtype)
                if norm.module.momentum is None:  # a plain average over all calls so far
                    value.mul_(count / (count + calls)).add_(rest, alpha=calls / (count + calls))
                else:
                    value.mul_((1 - norm.module.momentum) ** calls).add_(rest)
                count += calls
        self._committed(norm.count).add_(int(rows[:, -1].sum()))

    def commit_others(
        self, step: int, outcomes: Sequence[dict[str, Tensor]], shares: Sequence[float]
    ) -> None:
        """Merge buffers that changed; `outcomes[i]` are micro-batch i's values of them."""
        for name in outcomes[0]:
            piece = next(p for p in self.others if p.name == name)
            values, target = [o[name] for o in outcomes], self._committed(piece)
            if all(_same_bits(values[0], v) for v in values[1:]):
                target.copy_(values[0])
            elif name in self.rows:
                target.copy_(reduce(torch.minimum, values))
            elif piece.dtype.is_floating_point or piece.dtype.is_complex:
                wide = target.to(torch.complex128 if piece.dtype.is_complex else torch.float64)
                total = torch.zeros_like(wide)
                for value, share in zip(values, shares, strict=True):
                    total += (value.to(wide.dtype) - wide) * share
                target.copy_(wide + total)
            else:
                raise UnevenBuffer(name, step)

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Committed values from a checkpoint (names that are missing keep what they have)."""
        for piece in self.layout.pieces:
            for name in (piece.name, *piece.aliases):
                if name in tensors:
                    self._committed(piece).copy_(tensors[name])
        self.show()

    def show(self) -> None:
        """Let the module see the committed values, as for evaluation."""
        self._reinstate()
        self._stop_recording()
        for dtype, lane in self.committed.items():
            self.private[dtype].copy_(lane)

    def carried(self, name: str) -> Tensor:
        """As it is committed; to be changed in place, when a step is."""
        return self._committed(next(p for p in self.layout.pieces if p.name == name))

    def row_factors(self) -> dict[str, Tensor]:
        """Of the step that was committed last: by which factors rows of a parameter are shortened
        before they are updated."""
        pieces = [piece for piece in self.layout.pieces if piece.name in self.rows]
        return {self.rows[p.name].name: self._committed(p) for p in pieces}

    def _stop_recording(self) -> None:
        for rows in self.rows.values():
            rows.recording = False

    def _reinstate(self) -> None:
        """Code that assigned a new tensor to a buffer's name: take its value, put ours back.

        Names that had no tensor when the run began must not get one, and no tensor another shape:
        there is no place for it in what is merged and saved.
        """
        for module, name, piece, tensor in self._slots:
            now = module._buffers.get(name)  # pyright: ignore[reportPrivateUsage]
            if now is not tensor:
                if now is None or now.shape != tensor.shape or now.dtype != tensor.dtype:
                    raise TaskError(_changed_kind(piece.name, kind_of(tensor), now))
                self._value_view(piece).copy_(now.detach())
                module._buffers[name] = tensor  # pyright: ignore[reportPrivateUsage]
        for path, module, names in self._named:
            if any(b is not None for n, b in module._buffers.items() if n not in names):  # pyright: ignore[reportPrivateUsage]
                raise self._late(path, module, names)

    def _late(self, path: str, module: Module, names: frozenset[str]) -> TaskError:
        late = ((n, b) for n, b in module.named_buffers(recurse=False) if n not in names)
        name, tensor = next(late)
        return TaskError(_changed_kind(_join(path, name), "nothing", tensor))

    def _value_view(self, piece: TensorPlace) -> Tensor:
        return piece.view(self.private[piece.dtype])

    def _value(self, piece: TensorPlace) -> Tensor:
        return self._value_view(piece).detach().cpu()

    def _committed(self, piece: TensorPlace) -> Tensor:
        return piece.view(self.committed[piece.dtype])


def kind_of(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _changed_kind(name: str, was: str, now: Tensor | None) -> str:
    found = "nothing" if now is None else kind_of(now)
    return (
        f"buffer '{name}' was {was} when the model was built, and is {found} now. It cannot be "
        "merged between workers, nor saved. Register every buffer when the model is built, with "
        "the shape and dtype that it keeps (or let the function that builds the model run it once "
        "on an example before it returns it)."
    )


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def pack(outcomes: Iterable[dict[str, Tensor]], pieces: Sequence[TensorPlace]) -> NDArray[np.uint8]:
    """The values of `pieces` in each outcome, as bytes."""
    chunks = [_bytes_of(outcome[p.name]) for outcome in outcomes for p in pieces]
    return np.concatenate(chunks) if chunks else np.empty(0, dtype=np.uint8)


def unpack(data: NDArray[np.uint8], pieces: Sequence[TensorPlace]) -> dict[str, Tensor]:
    """One outcome back from its bytes."""
    values: dict[str, Tensor] = {}
    at = 0
    for piece in pieces:
        nbytes = piece.numel * piece.dtype.itemsize
        raw = torch.from_numpy(data[at : at + nbytes].copy())
        values[piece.name] = raw.view(piece.dtype).view(piece.shape)
        at += nbytes
    return values


def packed_size(pieces: Sequence[TensorPlace]) -> int:
    return sum(p.numel * p.dtype.itemsize for p in pieces)


def _raw(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _bytes_of(tensor: Tensor) -> NDArray[np.uint8]:
    return _raw(tensor).numpy()


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal to the last bit; NaN equals itself, 0.0 does not equal -0.0."""
    return torch.equal(_raw(a), _raw(b))


def _device(model: Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))
