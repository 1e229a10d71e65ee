# SPDX-License-Identifier: Apache-2.0
"""A saved step's model, as a user would hold it: a plain module, its tensors its own, in eval mode.

Nothing of training is built for it: no optimizer, no flat vectors. A module that the task was given
ready made is copied, so that loading a run changes nothing that somebody else holds.
"""

import copy
import random
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from manyhands.checkpoint import step_files
from manyhands.training.compute.seeds import seed_everything
from manyhands.training.memory.memory import Memory
from manyhands.training.state.module_buffers import kind_of
from manyhands.training.state.replica import build_model
from manyhands.training.state.rows.tables import Tables
from manyhands.values.errors import CheckpointMismatch
from manyhands.values.plain_names import plain_name
from manyhands.values.task import Task
from manyhands.worker.checkpoint_part import tables_of

TRAINED = "trained"


def trained_model(task: Task, folder: Path, seed: int, weights: str = TRAINED) -> Module:
    """The task's model with the weights and buffers of the step in `folder`."""
    tensors = step_files.read_model(folder, weights)
    if weights != TRAINED:  # averages are kept of weights: buffers are those of the step
        tensors = step_files.read_model(folder) | tensors
    given = copy.deepcopy(task.model) if isinstance(task.model, Module) else task.model
    with randomness_kept():
        seed_everything(seed, "model")
        model = build_model(given)
    take(model, tensors, where=str(folder))
    tables = Tables(model, Memory(None), seed)
    tables.reset(0, tables_of(folder, tables, state=False))
    passing, _ = step_files.read_state(folder)
    with torch.no_grad():
        buffers = _by_plain_name(dict(model.named_buffers(remove_duplicate=False)))
        for name in passing.keys() & buffers.keys():
            buffers[name].copy_(passing[name])
    return model.eval()


def take(model: Module, tensors: Mapping[str, Tensor], *, where: str) -> None:
    """Give a model its weights and buffers by name; whatever does not fit is named."""
    here = _by_plain_name(model.state_dict(keep_vars=True))
    given = {plain_name(name): tensor for name, tensor in tensors.items()}
    known = {id(here[name]) for name in given if name in here}
    # Tied ones are stored once, under one of their names.
    problems = [f"it lacks '{name}'" for name, tensor in here.items() if id(tensor) not in known]
    problems += [f"it has '{name}', which the model has not" for name in given.keys() - here.keys()]
    for name in given.keys() & here.keys():
        ours, theirs = here[name], given[name]
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            problems.append(f"'{name}' is {kind_of(theirs)} there, {kind_of(ours)} in the model")
    if problems:
        shown = "; ".join(sorted(problems)[:5])
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise CheckpointMismatch(f"{where} belongs to another model: {shown}{more}.")
    with torch.no_grad():
        for name, tensor in given.items():
            here[name].copy_(tensor)


def _by_plain_name(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {plain_name(name): tensor for name, tensor in tensors.items()}


@contextmanager
def randomness_kept() -> Generator[None]:
    """Whoever loads a model may be in the middle of something that draws."""
    before = random.getstate(), np.random.get_state(legacy=False)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
