# SPDX-License-Identifier: Apache-2.0
"""Clipping by global norm, with a norm that does not depend on who computed which part of it.

The norm of each block (layout.blocks) is taken by itself, and the blocks' norms are combined in
float64 in their fixed order. A config of one micro-batch per step can only have one worker; there
the norm is PyTorch's own, tensor by tensor, so that such a run equals a hand-written loop.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_FOREACH_NORM: Any = getattr(torch, "_foreach_norm")  # noqa: B009 (private, and no other way)


def block_norms(blocks: Sequence[Tensor]) -> NDArray[np.float64]:
    if not blocks:
        return np.zeros(0)
    norms: Any = _FOREACH_NORM(list(blocks))
    return torch.stack([n.to(torch.float64) for n in norms]).cpu().numpy()


def coefficient(norms: NDArray[np.float64], clip_norm: float) -> float:
    """What to multiply the gradient with: 1.0 when it is short enough already."""
    total = math.sqrt(float(np.square(norms).sum()))
    return min(1.0, clip_norm / (total + 1e-6))


def torch_coefficient(gradients: Sequence[Tensor], clip_norm: float) -> float:
    """As torch.nn.utils.clip_grad_norm_ computes it."""
    total = torch.nn.utils.get_total_norm(list(gradients))
    return torch.clamp(clip_norm / (total + 1e-6), max=1.0).item()
