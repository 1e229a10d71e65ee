# SPDX-License-Identifier: Apache-2.0
"""What a task's `predict` returned → named columns: classes by their names, numbers as they are.

What is said of a record depends on its own row alone. Of classes, `prediction` is the name of the
likeliest, `probability` how likely it is, and `p_NAME` how likely each is; anything else is
`prediction`, one number or a list of them. A dict of tensors gives a column of each name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from manyhands.prediction.output_meaning import Meaning
from manyhands.values.errors import TaskError

FEW = 10
"""Up to so many classes, each has a column."""

PREDICTION, PROBABILITY = "prediction", "probability"

Outputs = Tensor | Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Naming:
    classes: tuple[Any, ...] | None = None
    """In the order of their numbers; None where the label has none."""
    meaning: Meaning | None = None
    """Of one number for two classes; None: to be found out from how it was computed."""
    every_class: bool = False
    """A column for each, however many."""

    def is_open(self, outputs: Outputs) -> bool:
        """Whether the meaning has to be found out."""
        return self.meaning is None and self._is_one_of_two(outputs)

    def _is_one_of_two(self, outputs: Outputs) -> bool:
        return (
            isinstance(outputs, Tensor)
            and outputs.is_floating_point()
            and self.classes is not None
            and len(self.classes) == 2
            and _width(outputs) is None
        )

    def columns(self, outputs: Outputs) -> dict[str, pa.Array]:
        """One row per record."""
        if isinstance(outputs, Mapping):
            return {str(name): _plain(tensor) for name, tensor in outputs.items()}
        classes = self.classes
        if classes is not None:
            if self._is_one_of_two(outputs) and self.meaning in ("logits", "probabilities"):
                found = outputs.detach().reshape(len(outputs)).float()
                second = found.sigmoid() if self.meaning == "logits" else found
                return self._of_classes(torch.stack([1 - second, second], dim=1))
            if outputs.is_floating_point() and _width(outputs) == len(classes) > 1:
                return self._of_classes(_probabilities(outputs.detach().float()))
            if _is_index(outputs):
                return {PREDICTION: self._names(outputs.detach().reshape(len(outputs)))}
        return {PREDICTION: _plain(outputs)}

    def _of_classes(self, probabilities: Tensor) -> dict[str, pa.Array]:
        assert self.classes is not None
        best = probabilities.amax(dim=1)
        # Of equals the first, on every processor.
        if len(self.classes) == 2:
            places = probabilities[:, 1] > probabilities[:, 0]
        else:
            places = (probabilities == best[:, None]).int().argmax(dim=1)
        places = places.to(torch.int64).masked_fill(best.isnan(), -1)  # which is no class
        columns = {PREDICTION: self._names(places), PROBABILITY: _plain(best)}
        if self.every_class or len(self.classes) <= FEW:
            for k, name in enumerate(self.classes):
                columns[f"p_{name}"] = _plain(probabilities[:, k])
        return columns

    def _names(self, places: Tensor) -> pa.Array:
        assert self.classes is not None
        indices = places.to(torch.int64).numpy()
        strange = (indices < 0) | (indices >= len(self.classes))
        mask = strange if strange.any() else None
        return pa.array(list(self.classes)).take(pa.array(indices, mask=mask))


def outputs_of(made: Any, records: int) -> Outputs:
    """The predictions that `predict` returned, with or without targets; one row per record."""
    if isinstance(made, tuple | list):
        pair: Sequence[Any] = made
        if len(pair) != 2:
            raise TaskError(
                f"predict returned {len(pair)} things; give (predictions, targets), or predictions."
            )
        made = pair[0]
    if isinstance(made, Mapping):
        named: Mapping[str, Any] = made
        return {name: _rows(name, value, records) for name, value in named.items()}
    return _rows(PREDICTION, made, records)


def _rows(name: str, value: Any, records: int) -> Tensor:
    tensor = torch.as_tensor(value)
    if tensor.dim() == 0 and records == 1:  # `squeeze()` takes away the only row of a batch of one
        tensor = tensor.view(1)
    if tensor.dim() == 0 or len(tensor) != records:
        raise TaskError(
            f"predict returned {name} of shape {tuple(tensor.shape)} for {records} records; it "
            "needs one row for each."
        )
    return tensor


def _width(outputs: Tensor) -> int | None:
    """Numbers of each record: None for one."""
    if outputs.dim() == 1 or (outputs.dim() == 2 and outputs.shape[1] == 1):
        return None
    return outputs.shape[1] if outputs.dim() == 2 else -1


def _is_index(outputs: Tensor) -> bool:
    whole = not outputs.is_floating_point() and not outputs.is_complex()
    return whole and _width(outputs) is None


def _probabilities(rows: Tensor) -> Tensor:
    """Rows that are distributions as they are; others as logits, or as logarithms of such."""
    if len(rows) == 0:
        return rows
    sums = (rows.sum(dim=1) - 1).abs() <= 1e-3
    given = sums & (rows >= 0).all(dim=1)
    return torch.where(given[:, None], rows, rows.softmax(dim=1))


def _plain(tensor: Tensor) -> pa.Array:
    """Numbers, or lists of them, nested as the tensor is."""
    values = tensor.detach().cpu()
    if values.dtype in (torch.bfloat16, torch.float16):
        values = values.float()
    if values.dim() == 2 and values.shape[1] == 1:
        values = values.reshape(len(values))
    values = values.contiguous()
    made: Any = pa.array(values.reshape(-1).numpy())
    for size in reversed(values.shape[1:]):
        made = _lists(made, size, values)
    return made


def _lists(inner: pa.Array, size: int, whole: Tensor) -> pa.Array:
    if size == 0:
        raise TaskError(f"predict returned predictions of shape {tuple(whole.shape)}: no numbers.")
    offsets = pa.array(range(0, len(inner) + 1, size), pa.int32())
    return pa.ListArray.from_arrays(offsets, inner)
