# SPDX-License-Identifier: Apache-2.0
"""One leaf of the sum: forward and backward of one micro-batch.

What it computes depends on the weights, the buffers' committed values, the seed, the step and the
index. Afterwards the parameters' `.grad` hold this micro-batch's gradient times its scale.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from manyhands.accounting.deal_micro_batches import MicroBatch
from manyhands.training.compute.seeds import seed_everything
from manyhands.values.errors import TaskError
from manyhands.values.forked_children import one_process
from manyhands.values.half_precision import autocast

LossFn = Callable[[Module, Any], Any]

MOST_NUMBERS = 32
"""How many numbers a loss may return beside itself."""


@dataclass(frozen=True, slots=True)
class Leaf:
    loss: float
    weight: float | None
    """What the loss itself says it should count; None: its share of the step's records."""
    numbers: dict[str, float]


def compute(
    model: Module,
    micro_batch: MicroBatch,
    loss: LossFn,
    *,
    seed: int,
    precision: str,
    scale: float = 1.0,
    during: AbstractContextManager[None] | None = None,
) -> Leaf:
    """`scale`: of the loss, and so of the gradients (loss_scale.py). `during` is entered around
    backward."""
    seed_everything(seed, micro_batch.step, micro_batch.index, "forward")
    device = next((p.device.type for p in model.parameters()), "cpu")
    with one_process(), autocast(device, precision):
        value, weight, numbers = read_loss(loss(model, micro_batch.batch))
    if not value.requires_grad:
        raise TaskError(
            "the loss does not depend on any weight that is trained: it was detached, computed "
            "under torch.no_grad() or from numbers, or all weights are frozen. Return it as "
            "computed from what the model returned."
        )
    part = micro_batch.share if weight is None else weight
    counted = value if part == 1.0 else value * part
    if scale != 1.0:  # as GradScaler does it: a loss in fp16 becomes one in fp32
        counted = counted * torch.full((), scale, device=counted.device)
    # Not value.backward(gradient=scale): checking its shape makes torch import sympy (0.6 s).
    with one_process(), during or nullcontext():
        counted.backward()
    return Leaf(value.item(), weight, numbers)


def digest(parameters: Iterable[Tensor], leaf: Leaf, of_rows: Iterable[Tensor] = ()) -> int:
    """48 bits of a hash over a micro-batch's loss and gradients; they are left as they are."""
    found = hashlib.sha256(repr((leaf.loss, leaf.weight)).encode())
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            dense = gradient.to_dense() if gradient.is_sparse else gradient
            raw = dense.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            found.update(raw.numpy().data)
        found.update(b"|")
    for tensor in of_rows:
        found.update(tensor.numpy().tobytes() + b"|")
    return int.from_bytes(found.digest()[:6], "big") or 1


def read_loss(
    returned: Any, who: str = "the loss"
) -> tuple[Tensor, float | None, dict[str, float]]:
    """`mean`, `(mean, weight)`, `(mean, numbers)` or `(mean, weight, numbers)`."""
    if (several := _losses_in(returned)) > 1:
        raise TaskError(
            f"{who} returned {several} losses. It must return one number: add them up, and log "
            'them beside it if you like: return a + b, {"a": a.detach(), "b": b.detach()}.'
        )
    parts = list(returned) if isinstance(returned, tuple) else [returned]
    numbers: dict[str, float] = {}
    if len(parts) > 1 and isinstance(parts[-1], Mapping):
        numbers = {str(k): float(v) for k, v in parts.pop().items()}
    weight = None if len(parts) < 2 else float(parts[1])
    value = parts[0]
    if len(parts) > 2 or not isinstance(value, Tensor) or value.numel() != 1:
        shape = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise TaskError(
            f"{who} returned {shape}; it must return a mean (one number, a tensor), or "
            "(mean, weight), or either with a dict of numbers to log at the end."
        )
    if len(numbers) > MOST_NUMBERS:
        raise TaskError(
            f"{who} returned {len(numbers)} numbers to log; {MOST_NUMBERS} at the most."
        )
    if weight is not None and not weight >= 0:
        raise TaskError(f"{who} returned the weight {weight}; it must be 0 or more.")
    return value.reshape(()), weight, numbers


def _losses_in(returned: Any) -> int:
    """How many numbers to be made small are in a list, a tuple or a dict: a weight is none."""
    if isinstance(returned, Mapping):
        values = list(returned.values())
    else:
        values = list(returned) if isinstance(returned, list | tuple) else []
    return sum(isinstance(value, Tensor) and value.requires_grad for value in values)
