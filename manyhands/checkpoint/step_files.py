# SPDX-License-Identifier: Apache-2.0
"""Which files a step consists of, and what is in them.

    model.safetensors          weights and persistent buffers, under the names of a state_dict
    state.safetensors          buffers that a state_dict leaves out; as metadata the step, the
                               optimizer's groups and the schedule, in JSON
    optimizer-00.safetensors   the optimizer state of the spans that worker 0 held, as
                               `key/name@offset`
    manifest.json              sizes and checksums of the others

The first is what people load elsewhere. Optimizer state is written as it was shared out and read
back by any number of workers.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from manyhands.checkpoint.safetensors_files import can_encode, decode
from manyhands.checkpoint.saver import Content
from manyhands.values.errors import TrainError

MODEL = "model.safetensors"
STATE = "state.safetensors"

SavedNumber = float | int | bool
SavedEntry = tuple[str, str, int, Tensor | SavedNumber]
"""Of optimizer state: key, parameter's name, offset in it, value."""


def model_content(tensors: Mapping[str, Tensor]) -> Content:
    for name, tensor in tensors.items():
        if not can_encode(tensor):
            raise TrainError(f"'{name}' is {tensor.dtype}, which a safetensors file cannot hold.")
    return Content(MODEL, tensors, {"format": "pt"})


def state_content(passing: Mapping[str, Tensor], state: Mapping[str, Any]) -> Content:
    return Content(STATE, passing, {"state": json.dumps(state)})


def optimizer_content(worker: int, entries: Iterable[SavedEntry]) -> Content:
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, SavedNumber] = {}
    for key, name, offset, value in entries:
        place = f"{key}/{name}@{offset}"
        if isinstance(value, Tensor):
            tensors[place] = value
        else:
            numbers[place] = value
    return Content(f"optimizer-{worker:02d}.safetensors", tensors, {"numbers": json.dumps(numbers)})


def read_model(folder: Path) -> dict[str, Tensor]:
    return decode(folder / MODEL)[0]


def read_state(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    passing, metadata = decode(folder / STATE)
    return passing, json.loads(metadata["state"])


def read_optimizer(folder: Path) -> Iterator[SavedEntry]:
    """All entries, from however many files."""
    for path in sorted(folder.glob("optimizer-*.safetensors")):
        tensors, metadata = decode(path)
        everything: dict[str, Tensor | SavedNumber] = {**tensors, **json.loads(metadata["numbers"])}
        for place, value in everything.items():
            key, _, rest = place.partition("/")
            name, _, offset = rest.rpartition("@")
            yield key, name, int(offset), value
