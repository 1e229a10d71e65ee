"""Which records of a batch hold NaN or infinity themselves, in words."""

from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from manyhands.data.reading.not_finite_values import not_finite_values

Pair = namedtuple("Pair", "x y")
NAN, INF = float("nan"), float("inf")
FINE = torch.ones(4, 2)
ONE = torch.tensor([[1.0, 2.0], [3.0, NAN], [1.0, 1.0], [1.0, 1.0]])
BOTH = "record 10 holds nan in batch['x']; record 10 holds nan in batch['y']"
RECORDS = [30, 10, 20, 40]


def with_value(value: float, *rows: int) -> torch.Tensor:
    made = FINE.clone()
    made[list(rows), 1] = value
    return made


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ({"y": FINE, "x": ONE}, "record 10 holds nan in batch['x']"),
        ((FINE, ONE), "record 10 holds nan in batch[1]"),
        (Pair(FINE, ONE), "record 10 holds nan in batch.y"),
        (SimpleNamespace(x=ONE), "record 10 holds nan in batch.x"),
        ({"deep": [{"x": ONE}]}, "record 10 holds nan in batch['deep'][0]['x']"),
        (ONE, "record 10 holds nan in batch"),
        ({"x": ONE.numpy()}, "record 10 holds nan in batch['x']"),
        ({"x": ONE.numpy().astype(np.float64)[:, ::-1]}, "record 10 holds nan in batch['x']"),
        ({"x": ONE.bfloat16()}, "record 10 holds nan in batch['x']"),
        ({"x": with_value(NAN, 0, 3)}, "records 30, 40 hold nan in batch['x']"),
        ({"x": with_value(INF, 2)}, "record 20 holds infinite values in batch['x']"),
        ({"x": with_value(-INF, 2), "y": ONE}, "record 10 holds nan in batch['y']"),
        ({"mask": with_value(-INF, 0, 1, 2, 3)}, ""),
        ({"x": ONE, "y": ONE}, BOTH),
        ({"flat": ONE.reshape(-1)}, "batch['flat'] holds nan"),
        (torch.tensor(NAN), "batch holds nan"),
        ({"x": FINE, "n": torch.ones(4, dtype=torch.long), "name": ["a"] * 4, "none": None}, ""),
        (None, ""),
    ],
)  # fmt: skip
def test_they_are_named(batch: Any, said: str) -> None:
    assert not_finite_values(batch, RECORDS) == said


def test_of_many_some_are_named() -> None:
    said = not_finite_values({"x": torch.full((20,), NAN)}, range(20))
    assert said == "records 0, 1, 2, 3, 4, 5, 6, 7 and 12 more hold nan in batch['x']"
