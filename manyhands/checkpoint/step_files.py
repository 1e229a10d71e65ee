# SPDX-License-Identifier: Apache-2.0
"""Which files a step consists of, and what is in them.

    model.safetensors          weights and persistent buffers, under the names of a state_dict
    ema.safetensors            the same with train.ema's average of the weights, where there is one;
    swa.safetensors            likewise; as metadata, of how many weights
    state.safetensors          buffers that a state_dict leaves out; as metadata the step, the
                               optimizer's groups and the schedule, in JSON
    optimizer-00.safetensors   the optimizer state of the spans that worker 0 held, as
                               `key/name@offset`
    table-user-00.arrows       rows of a table that worker 0 updated (table_files.py)
    manifest.json              sizes and checksums of the others

The first is what people load elsewhere. Optimizer state is written as it was shared out and read
back by any number of workers.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from manyhands.checkpoint.safetensors_files import can_encode, decode, fingerprint
from manyhands.checkpoint.saver import Content
from manyhands.checkpoint.table_files import fingerprint_tables
from manyhands.values.errors import RunDirError, TrainError

MODEL = "model.safetensors"
STATE = "state.safetensors"
AVERAGES = ("ema", "swa")

SavedNumber = float | int | bool
SavedEntry = tuple[str, str, int, Tensor | SavedNumber]
"""Of optimizer state: key, parameter's name, offset in it, value."""


def model_content(tensors: Mapping[str, Tensor]) -> Content:
    return _weights(MODEL, tensors, {})


def average_content(name: str, tensors: Mapping[str, Tensor], count: int) -> Content:
    """An average of the weights, called `name`, over `count` of them."""
    return _weights(f"{name}.safetensors", tensors, {"n_averaged": str(count)})


def _weights(file: str, tensors: Mapping[str, Tensor], more: Mapping[str, str]) -> Content:
    for name, tensor in tensors.items():
        if not can_encode(tensor):
            raise TrainError(f"'{name}' is {tensor.dtype}, which a safetensors file cannot hold.")
    return Content(file, tensors, {"format": "pt", **more})


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


def weights_file(weights: str = "trained") -> str:
    """The file of a step with these weights: "trained", or the name of an average."""
    return MODEL if weights == "trained" else f"{weights}.safetensors"


def read_model(folder: Path, weights: str = "trained") -> dict[str, Tensor]:
    """Weights and persistent buffers of a step: the trained ones, or an average ("ema", "swa")."""
    return decode(folder / _there(folder, weights))[0]


def read_average(folder: Path, name: str) -> tuple[int, dict[str, Tensor]]:
    """Of how many weights it is, and it itself."""
    tensors, metadata = decode(folder / _there(folder, name))
    return int(metadata["n_averaged"]), tensors


def _there(folder: Path, weights: str) -> str:
    file = weights_file(weights)
    if weights != "trained" and not (folder / file).exists():
        raise RunDirError(no_average(folder, weights))
    return file


def fingerprint_step(folder: Path, weights: str = "trained") -> str:
    """Of a step's weights and buffers, and of the rows of its tables."""
    of_model, of_tables = fingerprint(folder / weights_file(weights)), fingerprint_tables(folder)
    if of_tables is None:
        return of_model
    return hashlib.sha256(f"{of_model} {of_tables}".encode()).hexdigest()


def weights_files(folder: Path) -> list[str]:
    """The files with weights that a step has."""
    files = [weights_file(weights) for weights in ("trained", *AVERAGES)]
    return [file for file in files if (folder / file).exists()]


def no_average(folder: Path, weights: str) -> str:
    kept = [name for name in AVERAGES if (folder / weights_file(name)).exists()]
    there = ", ".join(("trained", *kept))
    known = weights in AVERAGES
    why = f" It is kept where train.{weights} was set when the run began." if known else ""
    return f"{folder} has no weights '{weights}'; there are: {there}.{why}"


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
