# SPDX-License-Identifier: Apache-2.0
"""Steps of torch's optimizers without the import of its compiler, which their wrappers cause."""

import inspect
import sys

import torch
from torch.optim import Optimizer

from manyhands.training.state.optimizer_kinds import has_hooks


def bare_step(optimizer: Optimizer) -> None:
    """torch's own steps without its wrappers for profiling and compiling, whose first use
    imports the compiler: 1.5 s. What users wrote is called as it is."""
    step = inspect.unwrap(type(optimizer).step)
    torchs = step.__module__.startswith("torch.optim.") and not has_hooks(optimizer)
    if torchs and not optimizer.defaults.get("differentiable"):
        with torch.no_grad():
            step(optimizer)
    else:
        optimizer.step()


def without_dynamo() -> None:
    """Spare a worker the import of torch._dynamo: 1.5 s, more than all else it does to start.

    Optimizers import it to tell the compiler to look away from some of their methods; here, as
    long as nothing has imported it, there is no compiler to tell.
    """
    if "torch._dynamo" not in sys.modules:
        for name in ("add_param_group", "state_dict", "load_state_dict", "zero_grad"):
            method = inspect.unwrap(getattr(Optimizer, name))
            setattr(method, "__dynamo_disable", method)
