# SPDX-License-Identifier: Apache-2.0
"""What transforms of a batch have in common: columns in and out as arrays, and no variation of
held-out records."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from manyhands.data.columns.array_types import AnyArray
from manyhands.data.ordering.record_randomness import ColumnBatch, Draw
from manyhands.values.errors import DataError

PerChannel = float | tuple[float, ...]
"""One number for all, or one for each channel or feature."""


@dataclass(frozen=True)
class RandomTransform(ABC):
    """Varies a column of training records. A value: it can be compared, printed and sent."""

    column: str

    def __call__(self, batch: ColumnBatch, draw: Draw) -> ColumnBatch:
        return with_columns(batch, self.varied(batch, draw)) if draw.training else batch

    @abstractmethod
    def varied(self, batch: ColumnBatch, draw: Draw) -> dict[str, AnyArray]:
        """The columns that change, by name, as fresh arrays."""


def array_of(batch: ColumnBatch, column: str) -> AnyArray:
    if column not in batch:
        raise DataError(f"a transform wants '{column}'; the batch has {', '.join(batch)}.")
    value = batch[column]
    return value.numpy() if isinstance(value, torch.Tensor) else np.asarray(value)


def with_columns(batch: ColumnBatch, changed: Mapping[str, AnyArray]) -> ColumnBatch:
    """Tensors where there were tensors."""
    found = dict(batch)
    for name, values in changed.items():
        values = np.ascontiguousarray(values)
        found[name] = torch.from_numpy(values) if isinstance(batch[name], torch.Tensor) else values
    return found
