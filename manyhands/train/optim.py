# SPDX-License-Identifier: Apache-2.0
"""The user's optimizer, shared out: each worker updates the spans of the weights that it owns.

The user's optimizer stays the holder of groups, and schedules act on it; before every step its
hyper-parameters are copied to the optimizer that does the work. Which parts may be separated
depends on what the optimizer looks at:

- element-wise ones (an exact-type list) get 1-D spans, cut at multiples of 16 elements, and give
  the same bits as on whole tensors;
- those that look at a whole tensor get whole tensors;
- unknown types, subclasses and optimizers with step hooks are left whole, on one worker;
- those that want to call the loss again (LBFGS) are refused.

A parameter that received no gradient in any micro-batch is skipped: None is not zero.
"""

import inspect
import json
import sys
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from manyhands.errors import OptimizerRefused
from manyhands.train.collective.contract import Bounds, Lanes
from manyhands.train.keep import Keep, SlotKey, Value
from manyhands.train.layout import Layout, Span, Unit, block_of

optim: Any = torch.optim

ELEMENT_WISE: set[type] = {
    optim.Adadelta,
    optim.Adagrad,
    optim.Adam,
    optim.Adamax,
    optim.AdamW,
    optim.ASGD,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.SGD,
}
TENSOR_WISE: set[type] = {optim.Adafactor, optim.Muon}


def how_to_cut(optimizer: Optimizer) -> tuple[str, str]:
    """Where `layout.share_out` may cut for this optimizer, and why."""
    kind = type(optimizer)
    step = inspect.signature(kind.step).parameters
    closure = step.get("closure")
    if kind is optim.LBFGS or (closure and closure.default is inspect.Parameter.empty):
        raise OptimizerRefused(
            f"{kind.__name__} calls the loss again inside its step (a closure), which has no "
            "meaning when the loss is spread over workers. Use an optimizer without a closure."
        )
    if kind is optim.SparseAdam:
        raise OptimizerRefused(
            "SparseAdam wants sparse gradients, and gradients are summed as dense vectors here. "
            "Use Adam (embeddings with sparse=True are fine)."
        )
    hooks = _hooks(optimizer)
    if kind in ELEMENT_WISE and not hooks:
        return "blocks", f"{kind.__name__} works element by element"
    if kind in TENSOR_WISE and not hooks:
        return "pieces", f"{kind.__name__} looks at whole tensors"
    why = f"{kind.__name__} has step hooks" if hooks else f"{kind.__name__} is not known to us"
    return "nowhere", f"{why}, so one worker runs it"


def _hooks(optimizer: Optimizer) -> bool:
    registered: Any = optimizer
    return bool(
        registered._optimizer_step_pre_hooks
        or registered._optimizer_step_post_hooks
        or registered._optimizer_state_dict_pre_hooks
        or registered._optimizer_state_dict_post_hooks
    )


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor or number of optimizer state: of parameter `name`, from `offset` on."""

    key: str
    name: str
    offset: int
    value: Tensor | float | int | bool


@dataclass(frozen=True, slots=True)
class Kept:
    """What an element-wise optimizer keeps for a parameter, found by letting it step on zeros."""

    slots: dict[SlotKey, torch.dtype]
    """Vectors as long as the parameter."""
    scalars: dict[str, torch.dtype]
    """Single numbers, as tensors."""
    by_group: list[dict[torch.dtype, tuple[str, ...]]]
    """The keys of both, per group and dtype of parameter."""
    replaced: frozenset[str]
    """Keys whose tensor is another one after each step."""


NOTHING_KEPT = Kept({}, {}, [], frozenset())


@dataclass(slots=True)
class _Work:
    """One unit and the optimizer over it."""

    unit: Unit
    tensors: list[Tensor]
    doing: Optimizer
    settled: set[int]


class SharedOut:
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
        keep: Keep,
        cut: str,
        kept: Kept,
    ) -> None:
        self.users, self.cut, self.kept, self.keep = optimizer, cut, kept, keep
        self.parameters, self.layout, self.weights = parameters, layout, weights
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
                elif values := self.keep.get_extras(span.index, step):
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
        return _Work(unit, tensors, _like(self.users, groups), set())

    def _tensor(self, span: Span) -> Tensor:
        if self.cut == "nowhere":
            return self.parameters[span.piece.name]
        lane = self.weights[span.piece.dtype]
        part = span.piece.view(lane) if self.cut == "pieces" else lane[span.start : span.stop]
        return part.detach().requires_grad_()

    def _attach(self, work: _Work, k: int, span: Span, tensor: Tensor, *, own: bool) -> None:
        """Give a span the state that is kept for it, if there is any."""
        keep, here = self.keep, block_of(self.layout, span)
        source = here if own else self.layout.first_blocks[span.index]
        if source != here:
            keep.exists[here] = keep.exists[source]
        if not keep.exists[source]:
            return
        group = self._group_of.get(id(self.parameters[span.piece.name]))
        state = work.doing.state[tensor]
        state.clear()
        work.settled.add(k)
        for key in self.kept.by_group[group][span.piece.dtype] if group is not None else ():
            if key in keep.scalars:
                lane = keep.scalars[key]
                lane[here] = lane[source]
                state[key] = lane[here]
            else:
                state[key] = keep.slots[key, span.piece.dtype][span.start : span.stop]

    def prepare(self, step: int) -> None:
        """What can be done for step `step` before its gradient is known."""
        if self.works:
            unit = self.works[0].unit
            self.keep.open(self.rank, unit, step)
            self._prepared = unit.blocks, step

    def update(
        self, work: _Work, gradient: Lanes, origin: Bounds, touched: Sequence[bool], step: int
    ) -> None:
        """Take step `step` for one unit. `gradient` covers `origin` of each lane."""
        if self._prepared != (work.unit.blocks, step):
            self.keep.open(self.rank, work.unit, step)
        self._prepared = None
        self._place_gradients(work, gradient, origin, touched)
        if work.doing is not self.users:
            for theirs, ours in zip(self.users.param_groups, work.doing.param_groups, strict=True):
                ours.update({k: v for k, v in theirs.items() if k != "params"})
        self._bare_step(work.doing)
        self._settle(work)
        if self.cut != "blocks" and self.keep.journals:
            for span, tensor in zip(work.unit.spans, work.tensors, strict=True):
                self.keep.put_extras(span.index, step + 1, self._plain_state(work, tensor))
        self.keep.close(self.rank, work.unit, step)
        if self.cut == "nowhere":  # the module must not keep views of the gradient
            for tensor in work.tensors:
                tensor.grad = None

    def _bare_step(self, optimizer: Optimizer) -> None:
        """torch's own steps without its wrappers for profiling and compiling, whose first use
        imports the compiler: 1.5 s. What users wrote is called as it is."""
        step = inspect.unwrap(type(optimizer).step)
        torchs = step.__module__.startswith("torch.optim.") and not _hooks(optimizer)
        if torchs and not optimizer.defaults.get("differentiable"):
            with torch.no_grad():
                step(optimizer)
        else:
            optimizer.step()

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
            for key, value in state.items():
                home = self._home(key, span)
                if home is not None and isinstance(value, Tensor) and value is not home:
                    home.copy_(value)
                    state[key] = home
            self.keep.exists[here] = 1

    def _home(self, key: str, span: Span) -> Tensor | None:
        if key in self.keep.scalars:
            return self.keep.scalars[key][block_of(self.layout, span)]
        lane = self.keep.slots.get((key, span.piece.dtype))
        return None if lane is None else lane[span.start : span.stop]

    def _plain_state(self, work: _Work, tensor: Tensor) -> dict[str, Value]:
        values: dict[str, Value] = {}
        for key, value in work.doing.state.get(tensor, {}).items():
            if value is None:
                continue
            if not isinstance(value, Tensor | float | int | bool):
                raise OptimizerRefused(
                    f"{type(self.users).__name__} keeps '{key}' of type "
                    f"{type(value).__name__} in its state; only tensors and numbers can be "
                    "saved without pickling."
                )
            values[str(key)] = value
        return values

    def entries(self) -> Iterator[Entry]:
        """Everything that must be saved of the units that are worked on here."""
        for work in self.works:
            for span, tensor in zip(work.unit.spans, work.tensors, strict=True):
                for key, value in self._plain_state(work, tensor).items():
                    yield Entry(key, span.piece.name, span.offset, value)

    def load(self, entries: Iterable[Entry]) -> None:
        """Take over saved state, however it was shared out when it was saved."""
        by_name: dict[str, list[tuple[_Work, int]]] = {}
        for work in self.works:
            for k, span in enumerate(work.unit.spans):
                by_name.setdefault(span.piece.name, []).append((work, k))
        for entry in entries:
            for work, k in by_name.get(entry.name, ()):
                self._load_into(work, work.unit.spans[k], work.tensors[k], entry)
                work.settled.add(k)

    def _load_into(self, work: _Work, span: Span, tensor: Tensor, entry: Entry) -> None:
        state, value = work.doing.state[tensor], entry.value
        home = self._home(entry.key, span) if self.cut == "blocks" else None
        if home is not None:
            self.keep.exists[block_of(self.layout, span)] = 1
        if home is None or not isinstance(value, Tensor):
            state[entry.key] = value.clone() if isinstance(value, Tensor) else value
            return
        state[entry.key] = home
        if home.dim() == 0:
            home.copy_(value)
            return
        first = max(span.offset, entry.offset)
        last = min(span.offset + span.stop - span.start, entry.offset + value.numel())
        if first < last:
            source = value.view(-1)[first - entry.offset : last - entry.offset]
            home[first - span.offset : last - span.offset].copy_(source)

    def keep_extras(self, step: int) -> None:
        """After `load`: what has no flat slot is kept too."""
        if self.cut == "blocks":
            return
        for work in self.works:
            for span, tensor in zip(work.unit.spans, work.tensors, strict=True):
                self.keep.put_extras(span.index, step, self._plain_state(work, tensor))

    def pack(self) -> bytes:
        """State that has no flat slot, for a worker with memory of its own."""
        if self.cut == "blocks":
            return b""
        packed: dict[int, dict[str, Any]] = {}
        for work in self.works:
            for span, tensor in zip(work.unit.spans, work.tensors, strict=True):
                values = self._plain_state(work, tensor)
                packed[span.index] = {key: _packed(value) for key, value in values.items()}
        return msgspec.msgpack.encode(packed)

    def unpack(self, data: bytes) -> None:
        if self.cut == "blocks":
            return
        packed = msgspec.msgpack.decode(data, type=dict[int, dict[str, Any]])
        for work in self.works:
            for span, tensor in zip(work.unit.spans, work.tensors, strict=True):
                values = packed.get(span.index, {})
                if values:
                    work.doing.state[tensor] = {k: _unpacked(v) for k, v in values.items()}


def _packed(value: Value) -> Any:
    if not isinstance(value, Tensor):
        return value
    raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return [str(value.dtype).removeprefix("torch."), list(value.shape), raw]


def _unpacked(value: Any) -> Value:
    if not isinstance(value, list):
        return value
    dtype, shape, raw = value
    flat = torch.frombuffer(bytearray(raw), dtype=getattr(torch, dtype)) if raw else torch.empty(0)
    return flat.view(shape)


def _like(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """The same kind with the same settings over other parameters.

    The settings are given to the constructor too, and not in the groups alone: Adagrad fills its
    state there.
    """
    kind: Any = type(optimizer)
    accepted = inspect.signature(kind).parameters
    return kind(groups, **{k: v for k, v in optimizer.defaults.items() if k in accepted})


def what_it_keeps(optimizer: Optimizer, layout: Layout) -> Kept:
    """The state of an element-wise optimizer, by letting it step on a few zeros."""
    kind: Any = type(optimizer)
    kept = Kept({}, {}, [], frozenset())
    replaced: set[str] = set()
    for group in optimizer.param_groups:
        keys: dict[torch.dtype, tuple[str, ...]] = {}
        for dtype in sorted(layout.trainable_sizes, key=str):
            scratch = torch.zeros(16, dtype=dtype, requires_grad=True)
            scratch.grad = torch.zeros_like(scratch)
            probe = _like(optimizer, [{**group, "params": [scratch]}])
            with torch.no_grad():
                inspect.unwrap(kind.step)(probe)
                before = dict(probe.state[scratch])
                inspect.unwrap(kind.step)(probe)
            found = {k: v for k, v in probe.state[scratch].items() if isinstance(v, Tensor)}
            replaced |= {k for k, v in found.items() if v is not before.get(k)}
            for key, value in found.items():
                if value.shape == scratch.shape:
                    kept.slots[key, dtype] = value.dtype
                else:
                    kept.scalars[key] = value.dtype
            keys[dtype] = tuple(found)
        kept.by_group.append(keys)
    return replace(kept, replaced=frozenset(replaced))


@contextmanager
def one_thread() -> Generator[None]:
    """Several threads would cut a span where vector kernels leave a scalar tail: other bits."""
    threads = torch.get_num_threads()
    if threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def without_dynamo() -> None:
    """Spare a worker the import of torch._dynamo: 1.5 s, more than all else it does to start.

    Optimizers import it to tell the compiler to look away from some of their methods; here, as
    long as nothing has imported it, there is no compiler to tell.
    """
    if "torch._dynamo" not in sys.modules:
        for name in ("add_param_group", "state_dict", "load_state_dict", "zero_grad"):
            method = inspect.unwrap(getattr(Optimizer, name))
            setattr(method, "__dynamo_disable", method)


def groups_to_json(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The hyper-parameters of each group, as far as they are numbers, strings and lists of them."""
    return [
        {key: plain for key, value in group.items() if (plain := _plain(value)) is not _NOT_PLAIN}
        for group in ({k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups)
    ]


def groups_from_json(optimizer: Optimizer, saved: Sequence[dict[str, Any]]) -> None:
    if len(saved) != len(optimizer.param_groups):
        raise OptimizerRefused(
            f"the checkpoint's optimizer has {len(saved)} parameter groups, this task's has "
            f"{len(optimizer.param_groups)}."
        )
    for group, values in zip(optimizer.param_groups, saved, strict=True):
        for key, value in values.items():
            _set_in_group(group, key, value)


def change_groups(optimizer: Optimizer, schedule: Any | None, settings: Mapping[str, Any]) -> None:
    """Set hyper-parameters in every group. Doing it twice is the same as doing it once.

    `lr` is the base rate: a schedule goes on from it, with the factor that it has reached.
    """
    for key, value in settings.items():
        for k, group in enumerate(optimizer.param_groups):
            if key != "lr" or schedule is None or "initial_lr" not in group:
                _set_in_group(group, key, value)
                continue
            factor = float(group["lr"]) / base if (base := float(group["initial_lr"])) else 1.0
            _set_in_group(group, "lr", value * factor if base != value else group["lr"])
            group["initial_lr"] = value
            for inner in (schedule, *getattr(schedule, "_schedulers", ())):
                if hasattr(inner, "base_lrs"):
                    inner.base_lrs[k] = value


def kinds_of(schedule: Any | None) -> list[str]:
    """The classes of a schedule and of those inside it."""
    if schedule is None:
        return []
    inner: Sequence[Any] = getattr(schedule, "_schedulers", ())
    return [type(schedule).__name__, *(kind for part in inner for kind in kinds_of(part))]


def _set_in_group(group: dict[str, Any], key: str, value: Any) -> None:
    old: Any = group.get(key)
    if isinstance(old, Tensor):
        old.fill_(float(value))
    else:
        group[key] = tuple(value) if isinstance(old, tuple) else value


_NOT_PLAIN = object()


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dim() == 0:
        return value.item()
    if isinstance(value, list | tuple):
        items = [_plain(v) for v in value]
        return _NOT_PLAIN if any(i is _NOT_PLAIN for i in items) else items
    return value if value is None or isinstance(value, bool | int | float | str) else _NOT_PLAIN


def schedule_to_json(schedule: Any | None) -> str | None:
    """A scheduler's state, or None when it holds more than numbers (it is then stepped again)."""
    if schedule is None:
        return None
    try:
        state = schedule.state_dict()
        text = json.dumps(state)
    except (TypeError, ValueError, AttributeError):
        return None
    # MultiStepLR's milestones are a dict with whole numbers as keys, which JSON makes strings.
    return text if _alike(json.loads(text), state) else None


def _alike(read: Any, state: Any) -> bool:
    """Whether what JSON gives back is what was put in (tuples may have become lists)."""
    if isinstance(state, dict):
        return (
            isinstance(read, dict)
            and read.keys() == state.keys()
            and all(_alike(read[k], v) for k, v in state.items())
        )
    if isinstance(state, list | tuple):
        return len(read) == len(state) and all(map(_alike, read, state))
    return type(read) is type(state) and read == state


def restore(
    optimizer: Optimizer,
    schedule: Any | None,
    *,
    groups: Sequence[dict[str, Any]],
    saved: str | None,
    step: int,
) -> None:
    """Groups and schedule as they were at `step`, on a fresh optimizer and a fresh schedule."""
    if schedule is not None and saved is None:
        optimizer._opt_called = True  # type: ignore[attr-defined]  # it was, before
        for _ in range(step):
            schedule.step()
    groups_from_json(optimizer, groups)
    if schedule is not None and saved is not None:
        schedule.load_state_dict(json.loads(saved))


def parameters_by_name(model: Module) -> dict[str, Tensor]:
    return dict(model.named_parameters())
