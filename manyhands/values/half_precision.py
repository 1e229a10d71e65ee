# SPDX-License-Identifier: Apache-2.0
"""Forward in `train.precision`, while it trains and wherever else the model of a run computes."""

import torch

_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device: str, precision: str) -> torch.autocast:
    """To be entered around forward; "fp32" changes nothing."""
    half = _HALF.get(precision)
    return torch.autocast(device, dtype=half or torch.bfloat16, enabled=half is not None)
