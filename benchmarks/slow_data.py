# SPDX-License-Identifier: Apache-2.0
"""A work of the benchmarks whose records take long to fetch; as a task, for `manyhands train`.

BENCHMARK_FETCH_S is what a record takes, BENCHMARK_FETCH whether it "waits" (as for a disk or a
server) or "computes" (as decoding does).
"""

import os
import time

import torch
from clock import Clock
from torch import Tensor
from torch.utils.data import Dataset
from works import LEARNING_RATE, WORKS

import manyhands as mh

FETCH, FETCH_S = "BENCHMARK_FETCH", "BENCHMARK_FETCH_S"


class SlowRows(Dataset[dict[str, Tensor]]):
    def __init__(self, columns: dict[str, Tensor]) -> None:
        self.columns = columns
        self.kind, self.seconds = os.environ[FETCH], float(os.environ[FETCH_S])

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, k: int) -> dict[str, Tensor]:
        if self.kind == "waits":
            time.sleep(self.seconds)
        else:
            until = time.thread_time() + self.seconds  # of this thread, however busy the machine
            while time.thread_time() < until:
                pass
        return {name: column[k] for name, column in self.columns.items()}


work = WORKS[os.environ["BENCHMARK_WORK"]]
data = SlowRows(work.data())

task = mh.Task(
    model=work.model,
    loss=work.loss,
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True),
    schedule=lambda optimizer: Clock(),
    data=data,
)
