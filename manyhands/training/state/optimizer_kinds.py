# SPDX-License-Identifier: Apache-2.0
"""What is known of an optimizer before its work is shared out: where to cut it, what it keeps.

Which parts may be separated depends on what the optimizer looks at:

- element-wise ones (an exact-type list) get 1-D spans, cut at multiples of 16 elements, and give
  the same bits as on whole tensors;
- those that look at a whole tensor get whole tensors;
- unknown types, subclasses and optimizers with step hooks are left whole, on one worker;
- those that want to call the loss again (LBFGS) are refused.
"""

import inspect
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from manyhands.training.state.layout import Layout
from manyhands.training.state.optimizer_attributes import refuse_hidden_optimizers
from manyhands.training.state.phased_optimizer import PhasedOptimizer, kind_name, parts_of
from manyhands.training.state.undo_log import SlotKey
from manyhands.values.errors import OptimizerRefused

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

_COARSER = ("blocks", "pieces", "nowhere")


def how_to_cut(optimizer: Optimizer) -> tuple[str, str]:
    """Where `layout.share_out` may cut for this optimizer, and why."""
    if isinstance(optimizer, PhasedOptimizer):  # where all of them may be
        ways = [how_to_cut(part) for part in optimizer.parts.values()]
        return max(ways, key=lambda way: _COARSER.index(way[0]))
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
            "Use Adam (embeddings with sparse=True are fine), or for rows alone "
            'mh.Embedding(..., optimizer="adam").'
        )
    hooks = has_hooks(optimizer)
    if kind in ELEMENT_WISE and not hooks:
        return "blocks", f"{kind.__name__} works element by element"
    if kind in TENSOR_WISE and not hooks:
        return "pieces", f"{kind.__name__} looks at whole tensors"
    refuse_hidden_optimizers(optimizer)
    why = f"{kind.__name__} has step hooks" if hooks else f"{kind.__name__} is not known to us"
    return "nowhere", f"{why}, so one worker runs it"


def has_hooks(optimizer: Optimizer) -> bool:
    """Whether anything of the user's runs in its step: hooks of its own, hooks of all optimizers,
    or another `step` put in the place of its own (a schedule's wrapper is none)."""
    registered: Any = optimizer
    module: Any = inspect.getmodule(Optimizer)
    step: Any = optimizer.step
    replaced = inspect.unwrap(getattr(step, "__func__", step)) is not _own_step(optimizer)
    return replaced or bool(
        registered._optimizer_step_pre_hooks
        or registered._optimizer_step_post_hooks
        or registered._optimizer_state_dict_pre_hooks
        or registered._optimizer_state_dict_post_hooks
        or module._global_optimizer_pre_hooks
        or module._global_optimizer_post_hooks
    )


def _own_step(optimizer: Optimizer) -> Any:
    return inspect.unwrap(type(optimizer).step)


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


def what_it_keeps(optimizer: Optimizer, layout: Layout) -> Kept:
    """The state of an element-wise optimizer, by letting it step on a few zeros."""
    kept = Kept({}, {}, [], frozenset())
    replaced: set[str] = set()
    for part, group in ((p, g) for p in parts_of(optimizer) for g in p.param_groups):
        kind: Any = type(part)
        keys: dict[torch.dtype, tuple[str, ...]] = {}
        for dtype in sorted(layout.trainable_sizes, key=str):
            scratch = torch.zeros(16, dtype=dtype, requires_grad=True)
            scratch.grad = torch.zeros_like(scratch)
            probe = like(part, [{**group, "params": [scratch]}])
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


def refuse_what_comes_late(
    optimizer: Optimizer, known: Collection[str], key: str, value: object
) -> None:
    """`known`: what it was found to keep for such a parameter."""
    if isinstance(value, Tensor) and key not in known:
        raise OptimizerRefused(
            f"{kind_name(optimizer)} has begun to keep '{key}', which it did not when the run "
            "began; there is no place for it that outlives a worker. Was momentum 0 then? Begin "
            "with one above 0, however small."
        )


def like(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """The same kind with the same settings over other parameters.

    The settings are given to the constructor too, and not in the groups alone: Adagrad fills its
    state there.
    """
    if isinstance(optimizer, PhasedOptimizer):
        shared_out = optimizer.groups_by_part(groups)
        made = {name: like(part, shared_out[name]) for name, part in optimizer.parts.items()}
        return PhasedOptimizer(made, optimizer.phases)
    kind: Any = type(optimizer)
    accepted = inspect.signature(kind).parameters
    return kind(groups, **{k: v for k, v in optimizer.defaults.items() if k in accepted})
