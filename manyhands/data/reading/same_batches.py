# SPDX-License-Identifier: Apache-2.0
"""Whether two batches hold the same values, to the last bit."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def same_batches(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and _bytes(a) == _bytes(b)
    if isinstance(a, np.ndarray):
        alike = a.dtype == b.dtype and a.shape == b.shape
        return alike and (repr(a) == repr(b) if a.dtype.hasobject else a.tobytes() == b.tobytes())
    if isinstance(a, Mapping):
        return list(a) == list(b) and all(same_batches(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same_batches, a, b))
    if isinstance(a, float):
        return repr(a) == repr(b)  # NaN is the same as itself
    if hasattr(a, "__dict__") and not callable(a):
        return same_batches(vars(a), vars(b))
    return bool(a == b)


def _bytes(tensor: torch.Tensor) -> bytes:
    if tensor.is_sparse or tensor.is_quantized:
        tensor = tensor.to_dense() if tensor.is_sparse else tensor.dequantize()
    raw = torch.empty(tensor.shape, dtype=tensor.dtype)
    raw.copy_(tensor.detach())
    return raw.view(-1).view(torch.uint8).numpy().tobytes()
