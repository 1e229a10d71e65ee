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
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from manyhands.errors import OptimizerRefused
from manyhands.train.collective.contract import Bounds, Lanes
from manyhands.train.layout import Layout, Span
from manyhands.train.memory import Memory

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


class SharedOut:
    """This worker's part of the optimizer."""

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Mapping[str, Tensor],
        layout: Layout,
        weights: Lanes,
        spans: Sequence[Span],
        cut: str,
        memory: Memory,
    ) -> None:
        self.users, self.spans, self.cut = optimizer, list(spans), cut
        self.slots = _slots(optimizer, layout, memory) if cut == "blocks" else {}
        self.tensors = [self._tensor(span, parameters, weights) for span in spans]
        self.doing = self._doing(parameters)
        self._settled: set[int] = set()
        self._settle()

    def _tensor(self, span: Span, parameters: Mapping[str, Tensor], weights: Lanes) -> Tensor:
        if self.cut == "nowhere":
            return parameters[span.piece.name]
        lane = weights[span.piece.dtype]
        part = span.piece.view(lane) if self.cut == "pieces" else lane[span.start : span.stop]
        return part.detach().requires_grad_()

    def _doing(self, parameters: Mapping[str, Tensor]) -> Optimizer | None:
        """The optimizer that does the work; None when this worker owns nothing."""
        if not self.spans:
            return None
        if self.cut == "nowhere":
            return self.users
        mine: dict[int, list[Tensor]] = {}
        for span, tensor in zip(self.spans, self.tensors, strict=True):
            mine.setdefault(id(parameters[span.piece.name]), []).append(tensor)
        groups = [
            {**group, "params": [t for p in group["params"] for t in mine.get(id(p), [])]}
            for group in self.users.param_groups
        ]
        if not any(group["params"] for group in groups):
            return None
        return _like(self.users, groups)

    def step(self, gradient: Lanes, bounds: Bounds, touched: Sequence[bool]) -> None:
        """Update the owned spans. `gradient` covers `bounds` of each lane."""
        if self.doing is None:
            return
        self._place_gradients(gradient, bounds, touched)
        if self.doing is not self.users:
            for theirs, ours in zip(self.users.param_groups, self.doing.param_groups, strict=True):
                ours.update({k: v for k, v in theirs.items() if k != "params"})
        self._bare_step(self.doing)
        self._settle()

    def _bare_step(self, optimizer: Optimizer) -> None:
        """A known optimizer's step without torch's wrappers for profiling, hooks and compiling."""
        if self.cut == "nowhere":
            optimizer.step()
            return
        with torch.no_grad():
            inspect.unwrap(type(optimizer).step)(optimizer)

    def _place_gradients(self, gradient: Lanes, bounds: Bounds, touched: Sequence[bool]) -> None:
        for span, tensor in zip(self.spans, self.tensors, strict=True):
            if not touched[span.index]:
                tensor.grad = None
                continue
            lane, first = gradient[span.piece.dtype], bounds[span.piece.dtype][0]
            skip = span.start - first
            address = lane.data_ptr() + skip * lane.element_size()
            if tensor.grad is None or tensor.grad.data_ptr() != address:
                offset = lane.storage_offset() + skip
                tensor.grad = lane.as_strided(tensor.shape, tensor.stride(), offset)

    def release_gradients(self) -> None:
        """The module must not keep views of the shared gradient when it computes the next one."""
        if self.cut == "nowhere":
            for tensor in self.tensors:
                tensor.grad = None

    def _settle(self) -> None:
        """Move state that the optimizer has just created into our flat slots."""
        if self.doing is None or len(self._settled) == len(self.spans):
            return
        for k, (span, tensor) in enumerate(zip(self.spans, self.tensors, strict=True)):
            state = self.doing.state.get(tensor)
            if k in self._settled or not state:
                continue
            self._settled.add(k)
            for key, value in state.items():
                if (lane := self.slots.get((key, span.piece.dtype))) is not None:
                    home = lane[span.start : span.stop]
                    home.copy_(value)
                    state[key] = home

    def entries(self) -> Iterator[Entry]:
        """Everything that must be saved of the spans owned here."""
        if self.doing is None:
            return
        for span, tensor in zip(self.spans, self.tensors, strict=True):
            for key, value in self.doing.state.get(tensor, {}).items():
                if value is None:
                    continue
                if not isinstance(value, Tensor | float | int | bool):
                    raise OptimizerRefused(
                        f"{type(self.users).__name__} keeps '{key}' of type "
                        f"{type(value).__name__} in its state; only tensors and numbers can be "
                        "saved without pickling."
                    )
                yield Entry(key, span.piece.name, span.offset, value)

    def load(self, entries: Iterable[Entry]) -> None:
        """Take over saved state, however it was shared out when it was saved."""
        if self.doing is None:
            return
        by_name: dict[str, list[int]] = {}
        for k, span in enumerate(self.spans):
            by_name.setdefault(span.piece.name, []).append(k)
        for entry in entries:
            for k in by_name.get(entry.name, ()):
                self._load_into(self.spans[k], self.tensors[k], entry)
                self._settled.add(k)

    def _load_into(self, span: Span, tensor: Tensor, entry: Entry) -> None:
        assert self.doing is not None
        state = self.doing.state[tensor]
        lane = self.slots.get((entry.key, span.piece.dtype))
        if lane is None or not isinstance(entry.value, Tensor):
            value = entry.value
            state[entry.key] = value.clone() if isinstance(value, Tensor) else value
            return
        first = max(span.offset, entry.offset)
        last = min(span.offset + span.stop - span.start, entry.offset + entry.value.numel())
        home = lane[span.start : span.stop]
        if first < last:
            source = entry.value.view(-1)[first - entry.offset : last - entry.offset]
            home[first - span.offset : last - span.offset].copy_(source)
        state[entry.key] = home


def _like(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """The same kind with the same settings over other parameters.

    The settings are given to the constructor too, and not in the groups alone: Adagrad fills its
    state there.
    """
    kind: Any = type(optimizer)
    accepted = inspect.signature(kind).parameters
    return kind(groups, **{k: v for k, v in optimizer.defaults.items() if k in accepted})


def _slots(
    optimizer: Optimizer, layout: Layout, memory: Memory
) -> dict[tuple[str, torch.dtype], Tensor]:
    """A flat lane for each vector that an element-wise optimizer keeps per parameter.

    Which ones it keeps is found by letting it step once on a few zeros, with the same settings.
    """
    kind: Any = type(optimizer)
    found: dict[tuple[str, torch.dtype], torch.dtype] = {}
    for group in optimizer.param_groups:
        for dtype in sorted(layout.trainable_sizes, key=str):
            scratch = torch.zeros(16, dtype=dtype, requires_grad=True)
            scratch.grad = torch.zeros_like(scratch)
            probe = _like(optimizer, [{**group, "params": [scratch]}])
            with torch.no_grad():
                inspect.unwrap(kind.step)(probe)
            for key, value in probe.state[scratch].items():
                if isinstance(value, Tensor) and value.shape == scratch.shape:
                    found[key, dtype] = value.dtype
    return {
        (key, dtype): memory.tensor(layout.trainable_sizes[dtype], dtype=kept)
        for (key, dtype), kept in sorted(found.items(), key=str)
    }


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
