# SPDX-License-Identifier: Apache-2.0
"""The user's optimizer, shared out: each worker updates the spans of the weights that it owns.

The user's optimizer stays the holder of groups, and schedules act on it; before every step its
hyper-parameters are copied to the optimizer that does the work. Which parts may be separated
depends on its kind (optimizer_kinds.py).

A parameter that received no gradient in any micro-batch is skipped: None is not zero.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from manyhands.training.compute.seeds import seed_everything
from manyhands.training.state.bare_step import bare_step
from manyhands.training.state.followers import Follower
from manyhands.training.state.layout import (
    Bounds,
    Lanes,
    Layout,
    Span,
    Unit,
    block_of,
)
from manyhands.training.state.lent_weights import lendable, writable
from manyhands.training.state.max_norm_rows import shorten
from manyhands.training.state.module_buffers import ModuleBuffers
from manyhands.training.state.one_pass_update import OnePassUpdate, one_pass
from manyhands.training.state.optimizer_attributes import OptimizerAttributes
from manyhands.training.state.optimizer_kinds import Kept, how_to_cut, like, refuse_what_comes_late
from manyhands.training.state.param_groups import groups_from_json, groups_to_json
from manyhands.training.state.phased_optimizer import PhasedOptimizer, acting, kind_name
from manyhands.training.state.undo_log import KeptValue, UndoLog
from manyhands.values.errors import OptimizerRefused
from manyhands.values.plain_names import plain_name


@dataclass(frozen=True, slots=True)
class OptimizerEntry:
    """One tensor or number of optimizer state: of parameter `name`, from `offset` on."""

    key: str
    name: str
    offset: int
    value: Tensor | float | int | bool


@dataclass(slots=True)
class _Work:
    """One unit and the optimizer over it."""

    unit: Unit
    tensors: list[Tensor]
    doing: Optimizer
    settled: set[int]
    one_pass: OnePassUpdate | None = None


class ShardedOptimizer:
    """This worker's part of the optimizer.

    Where it is cut at blocks, all its state lives in `keep`: vectors in flat slots, counters in a
    number per block, of which a span uses the one of its first block. Spans of one parameter count
    alike, so after `regroup` any cut finds its counter at the parameter's first block.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Mapping[str, Tensor],
        layout: Layout,
        weights: Lanes,
        undo_log: UndoLog,
        cut: str,
        kept: Kept,
        buffers: ModuleBuffers,
        *,
        seed: int = 0,
    ) -> None:
        """`buffers`: an optimizer that is left whole may change them, in its hooks; and they say
        by which factors the rows of some parameters are shortened before the step that is taken
        (max_norm_rows.py). `seed`: of what such an optimizer draws at random."""
        self.users, self.cut, self.kept, self.undo_log = optimizer, cut, kept, undo_log
        self.buffers, self.seed = buffers, seed
        self.parameters, self.layout, self.weights = parameters, layout, weights
        self.row_factors = buffers.row_factors()
        groups = enumerate(optimizer.param_groups)
        self._group_of = {id(p): k for k, group in groups for p in group["params"]}
        self.rank = 0
        self._prepared: tuple[tuple[int, int], int] | None = None
        self.works: list[_Work] = []

    @property
    def units(self) -> list[Unit]:
        return [work.unit for work in self.works]

    def regroup(
        self,
        rank: int,
        units: Sequence[Unit],
        step: int,
        *,
        own: bool = False,
        fresh: bool = False,
    ) -> None:
        """Work on these units from now on, with the state that is kept after `step` steps.

        `own`: they are units of a step in progress, and each has counters of its own. `fresh`:
        nothing is kept yet. What is found then was made by another worker, just now, for its own
        units: some optimizers make state when they are constructed.
        """
        self.rank, self._prepared = rank, None
        if self.cut == "nowhere":
            self.users.state.clear()
        made = [self._work_on(unit) for unit in units]
        self.works = [work for work in made if work is not None]
        for work in self.works:
            for k, (span, tensor) in enumerate(zip(work.unit.spans, work.tensors, strict=True)):
                if fresh:
                    continue
                if self.cut == "blocks":
                    self._attach(work, k, span, tensor, own=own)
                elif values := self.undo_log.get_extras(span.index, step):
                    work.doing.state[tensor] = dict(values)
            self._settle(work)

    def _work_on(self, unit: Unit) -> _Work | None:
        tensors = [self._tensor(span) for span in unit.spans]
        if self.cut == "nowhere":
            return _Work(unit, tensors, self.users, set())
        mine: dict[int, list[Tensor]] = {}
        for span, tensor in zip(unit.spans, tensors, strict=True):
            mine.setdefault(id(self.parameters[span.piece.name]), []).append(tensor)
        groups = [
            {**group, "params": [t for p in group["params"] for t in mine.get(id(p), [])]}
            for group in self.users.param_groups
        ]
        work = _Work(unit, tensors, like(self.users, groups), set())
        if self.cut == "blocks" and self.undo_log.journals and not self.row_factors:
            work.one_pass = one_pass(work.doing, unit, tensors, self.undo_log, self.rank)
        return work

    def _tensor(self, span: Span) -> Tensor:
        if self.cut == "nowhere":
            return self.parameters[span.piece.name]
        lane = self.weights[span.piece.dtype]
        part = span.piece.view(lane) if self.cut == "pieces" else lane[span.start : span.stop]
        return part.detach().requires_grad_()

    def _attach(self, work: _Work, k: int, span: Span, tensor: Tensor, *, own: bool) -> None:
        """Give a span the state that is kept for it, if there is any."""
        undo_log, here = self.undo_log, block_of(self.layout, span)
        source = here if own else self.layout.first_blocks[span.index]
        if source != here:
            undo_log.exists[here] = undo_log.exists[source]
        if not undo_log.exists[source]:
            return
        group = self._group_of.get(id(self.parameters[span.piece.name]))
        state = work.doing.state[tensor]
        state.clear()
        work.settled.add(k)
        for key in self.kept.by_group[group][span.piece.dtype] if group is not None else ():
            if key in undo_log.scalars:
                lane = undo_log.scalars[key]
                lane[here] = lane[source]
                state[key] = lane[here]
            else:
                state[key] = undo_log.slots[key, span.piece.dtype][span.start : span.stop]

    def prepare(self, step: int) -> None:
        """What can be done for step `step` before its gradient is known."""
        if self.works and self.works[0].one_pass is None:
            unit = self.works[0].unit
            self.undo_log.open(self.rank, unit, step)
            self._prepared = unit.blocks, step

    def pass_over(self, step: int) -> None:
        """Step `step` is done without anything being changed."""
        self._prepared = None
        if self.works:
            self._keep_groups(step + 1)
        for work in self.works:
            if self.cut != "blocks":
                for span, tensor in zip(work.unit.spans, work.tensors, strict=True):
                    self.undo_log.put_extras(span.index, step + 1, self._plain_state(work, tensor))
            self.undo_log.close(self.rank, work.unit, step)

    def update(
        self,
        work: _Work,
        gradient: Lanes,
        origin: Bounds,
        touched: Sequence[bool],
        step: int,
        *,
        followers: Sequence[Follower] = (),
    ) -> bool:
        """Take step `step` for one unit. `gradient` covers `origin` of each lane. Returns whether
        `followers` have followed."""
        if work.doing is not self.users:
            for theirs, ours in zip(self.users.param_groups, work.doing.param_groups, strict=True):
                ours.update({k: v for k, v in theirs.items() if k != "params"})
        if self._rests(work, touched):
            self._prepared = None
            self.undo_log.close(self.rank, work.unit, step)
            return False
        if work.one_pass is not None and work.one_pass.take(
            gradient, origin, touched, step, followers
        ):
            return True
        if self._prepared != (work.unit.blocks, step):
            self.undo_log.open(self.rank, work.unit, step)
        self._prepared = None
        for span in work.unit.spans if self.row_factors else ():
            if (factors := self.row_factors.get(span.piece.name)) is not None:
                stretch = self.weights[span.piece.dtype][span.start : span.stop]
                shorten(stretch, span.offset, span.piece.shape[1], factors)
        self._place_gradients(work, gradient, origin, touched)
        if self.cut == "nowhere":
            self._whole_step(step)
        else:
            bare_step(acting(work.doing, step))
        self._settle(work)
        if self.cut != "blocks":
            for span, tensor in zip(work.unit.spans, work.tensors, strict=True):
                self.undo_log.put_extras(span.index, step + 1, self._plain_state(work, tensor))
        self.undo_log.close(self.rank, work.unit, step)
        if self.cut == "nowhere":  # the module must not keep views of the gradient
            for tensor in work.tensors:
                tensor.grad = None
        return False

    def _rests(self, work: _Work, touched: Sequence[bool]) -> bool:
        """Another phase's step, which changes nothing in this unit."""
        if self.cut != "blocks" or not isinstance(self.users, PhasedOptimizer) or self.row_factors:
            return False
        return not any(touched[span.index] for span in work.unit.spans)

    def _whole_step(self, step: int) -> None:
        """The user's optimizer as it is, hooks and all. They find the buffers as the step's
        micro-batches left them, merged; what they make of them is the state after the step, and
        counts as soon as the unit does (undo_log.py: the box of the step before stays). What is
        drawn at random depends on the step, not on who takes it."""
        self.buffers.show()
        seed_everything(self.seed, step, "optimizer")
        doing = acting(self.users, step)
        attributes = OptimizerAttributes(doing)
        with writable(lendable(self.layout.pieces, self.parameters, self.weights)):
            bare_step(doing)
        attributes.refuse_changes()
        self._keep_groups(step + 1)
        self.buffers.commit_alone()
        self.undo_log.put_buffers(step + 1, self.buffers.committed)

    def _place_gradients(
        self, work: _Work, gradient: Lanes, origin: Bounds, touched: Sequence[bool]
    ) -> None:
        for span, tensor in zip(work.unit.spans, work.tensors, strict=True):
            if not touched[span.index]:
                tensor.grad = None
                continue
            lane, first = gradient[span.piece.dtype], origin[span.piece.dtype][0]
            skip = span.start - first
            address = lane.data_ptr() + skip * lane.element_size()
            if tensor.grad is None or tensor.grad.data_ptr() != address:
                offset = lane.storage_offset() + skip
                tensor.grad = lane.as_strided(tensor.shape, tensor.stride(), offset)

    def _settle(self, work: _Work) -> None:
        """Move state that the optimizer has just created to where it is kept."""
        if self.cut != "blocks" or (
            len(work.settled) == len(work.tensors) and not self.kept.replaced
        ):
            return
        for k, (span, tensor) in enumerate(zip(work.unit.spans, work.tensors, strict=True)):
            state = work.doing.state.get(tensor)
            if not state or (k in work.settled and not self.kept.replaced):
                continue
            work.settled.add(k)
            here = block_of(self.layout, span)
            group = self._group_of.get(id(self.parameters[span.piece.name]))
            known = () if group is None else self.kept.by_group[group][span.piece.dtype]
            for key, value in state.items():
                refuse_what_comes_late(self.users, known, key, value)
                home = self._home(key, span)
                if home is not None and isinstance(value, Tensor) and value is not home:
                    home.copy_(value)
                    state[key] = home
            self.undo_log.exists[here] = 1

    def _home(self, key: str, span: Span) -> Tensor | None:
        if key in self.undo_log.scalars:
            return self.undo_log.scalars[key][block_of(self.layout, span)]
        lane = self.undo_log.slots.get((key, span.piece.dtype))
        return None if lane is None else lane[span.start : span.stop]

    def _plain_state(self, work: _Work, tensor: Tensor) -> dict[str, KeptValue]:
        values: dict[str, KeptValue] = {}
        for key, value in work.doing.state.get(tensor, {}).items():
            if value is None:
                continue
            if not isinstance(value, Tensor | float | int | bool):
                raise OptimizerRefused(
                    f"{kind_name(self.users)} keeps '{key}' of type "
                    f"{type(value).__name__} in its state; only tensors and numbers can be "
                    "saved without pickling."
                )
            values[str(key)] = value
        return values

    def entries(self) -> Iterator[OptimizerEntry]:
        """Everything that must be saved of the units that are worked on here."""
        for work in self.works:
            for span, tensor in zip(work.unit.spans, work.tensors, strict=True):
                for key, value in self._plain_state(work, tensor).items():
                    yield OptimizerEntry(key, span.piece.name, span.offset, value)

    def load(self, entries: Iterable[OptimizerEntry]) -> None:
        """Take over saved state, however it was shared out when it was saved."""
        by_name: dict[str, list[tuple[_Work, int]]] = {}
        for work in self.works:
            for k, span in enumerate(work.unit.spans):
                by_name.setdefault(span.piece.name, []).append((work, k))
        for entry in entries:
            for work, k in by_name.get(plain_name(entry.name), ()):
                self._load_into(work, work.unit.spans[k], work.tensors[k], entry)
                work.settled.add(k)

    def _load_into(self, work: _Work, span: Span, tensor: Tensor, entry: OptimizerEntry) -> None:
        state, value = work.doing.state[tensor], entry.value
        home = self._home(entry.key, span) if self.cut == "blocks" else None
        if home is not None:
            self.undo_log.exists[block_of(self.layout, span)] = 1
        if not isinstance(value, Tensor) or (home is None and not self._is_stretch(value)):
            state[entry.key] = value.clone() if isinstance(value, Tensor) else value
            return
        if home is None:  # all of it, of which other entries have the rest
            whole = state.setdefault(entry.key, torch.zeros_like(tensor, dtype=value.dtype))
            home = _as_it_lies(whole.detach())
        else:
            state[entry.key] = home
        if home.dim() == 0:
            home.copy_(value)
            return
        if value.dim() > 1:
            whole = torch.empty_like(self.parameters[span.piece.name], dtype=value.dtype)
            value = _as_it_lies(whole.detach().copy_(value))
        first = max(span.offset, entry.offset)
        last = min(span.offset + span.stop - span.start, entry.offset + value.numel())
        if first < last:
            source = value[first - entry.offset : last - entry.offset]
            home[first - span.offset : last - span.offset].copy_(source)

    def _is_stretch(self, value: Tensor) -> bool:
        """Saved where the optimizer was cut at blocks, and read where it is whole. (The other way
        round is told by its shape: `sync = "alone"` keeps what every optimizer keeps, whole.)"""
        return value.dim() == 1 and how_to_cut(self.users)[0] == "blocks"

    def _keep_groups(self, step: int) -> None:
        """What an optimizer keeps in its groups: only one that is left whole can change them, and
        it does so in one process alone."""
        if self.cut == "nowhere":
            groups = json.dumps(groups_to_json(self.users)).encode()
            self.undo_log.put_groups(step, groups)

    def take_groups(self, step: int) -> None:
        """As whoever took the step before has left them; the schedule has not followed yet."""
        if self.cut == "nowhere" and (kept := self.undo_log.get_groups(step)) is not None:
            groups_from_json(self.users, json.loads(kept))

    def keep_extras(self, step: int) -> None:
        """After `load`: what has no flat slot is kept too."""
        if self.cut == "blocks":
            return
        for work in self.works:
            for span, tensor in zip(work.unit.spans, work.tensors, strict=True):
                self.undo_log.put_extras(span.index, step, self._plain_state(work, tensor))


def _as_it_lies(tensor: Tensor) -> Tensor:
    """All elements of a dense tensor as one vector, in the order in which they lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))
