# SPDX-License-Identifier: Apache-2.0
"""The works of benchmarks/tables.py: records for the wide & deep model of the examples.

Ids are numbers below a million, so that nn.Embedding takes them too.
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from manyhands.zoo import movielens

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
recommender, in_a_loop = import_module("24_recommender"), import_module("25_recommender_plain")

BATCH, DIM, IDS = 4096, 16, 1_000_000
STEPS = {"movielens": 300, "million": 200}


def records(work: str) -> dict[str, Tensor]:
    found = in_a_loop.numbered(movielens.with_pairs(movielens.ratings()))
    count = len(found["user"]) // BATCH * BATCH
    found = {name: column[:count] for name, column in found.items()}
    if work == "million":
        dice = np.random.default_rng(0)
        for name in ("user", "item", "pairs"):
            drawn = dice.zipf(1.1, found[name].shape) * 0x9E3779B1 % IDS
            found[name] = torch.from_numpy(drawn)
    return found


def model(work: str, table: Any) -> torch.nn.Module:
    """With room for a million ids in each table, where there are so many."""

    def of_size(rows: int, dim: int, **settings: Any) -> Any:
        return table(max(rows, IDS) if work == "million" and rows > 1000 else rows, dim, **settings)

    return recommender.WideDeep(DIM, of_size)
