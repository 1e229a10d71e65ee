# SPDX-License-Identifier: Apache-2.0
"""Rows of an embedding table that are pulled and pushed, per second of one process's processor.

    python benchmarks/embedding_rows.py [--quick] [--rows 1000000] [--rounds 5] [--json FILE]

    torch        a parameter of all rows: `index_select`, and torch's optimizer with a coalesced
                 sparse gradient (Adagrad, SparseAdam); nothing outlives the process
    manyhands    a store of rows in shared memory: any 64-bit id, and an undo log

Messages of 5,000 rows of 16 columns, each pulled and then pushed; ids are drawn evenly ("uniform"),
or some much more often than others ("skewed": a message has fewer rows then). Both are one thread
in one process, and take turns, message by message. "new" is how many rows a second are made, with
their first gradient. Processor time is counted, which neighbours on the machine change less.
"""

import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import rows
import torch
from rows import Metric, Samples, Wanted

from manyhands.training.memory.memory import Memory
from manyhands.training.state.rows.row_init import NormalInit
from manyhands.training.state.rows.row_optimizers import RowOptimizer, row_optimizer
from manyhands.training.state.rows.row_store import RowStore, TableSpec

MESSAGE, DIM = 5000, 16
OPTIMIZERS: dict[str, tuple[RowOptimizer, Any]] = {
    "adagrad": (row_optimizer("adagrad", lr=0.01), torch.optim.Adagrad),
    "adam": (row_optimizer("adam", lr=0.01), torch.optim.SparseAdam),
}
METRICS = (Metric("per_s", "rows pulled + pushed /s"), Metric("new_per_s", "new /s"))
TARGETS = {("adagrad, uniform", "per_s"): Wanted("≥", 1e6, of_ratio=False)}
Ids = Any


class Ours:
    def __init__(self, count: int, optimizer: RowOptimizer) -> None:
        fd = os.memfd_create("table")
        os.ftruncate(fd, 1 << 44)
        spec = TableSpec(name="table", dim=DIM, capacity=count, init=NormalInit(0.01))
        self.store, self.step = RowStore(spec, optimizer, Memory(fd)), 0

    def pull(self, ids: Ids, positions: Ids) -> None:
        self.store.read(ids)

    def push(self, ids: Ids, positions: Ids, grads: torch.Tensor) -> None:
        self.step += 1
        self.store.apply(ids, grads, self.step)


class Torch:
    def __init__(self, count: int, optimizer: Any) -> None:
        self.weights = torch.nn.Parameter(torch.randn(count, DIM) * 0.01)
        self.optimizer = optimizer([self.weights], lr=0.01)

    def pull(self, ids: Ids, positions: Ids) -> None:
        with torch.no_grad():
            self.weights.index_select(0, torch.from_numpy(positions))

    def push(self, ids: Ids, positions: Ids, grads: torch.Tensor) -> None:
        indices = torch.from_numpy(positions)[None]
        self.weights.grad = torch.sparse_coo_tensor(
            indices, grads, self.weights.shape, is_coalesced=True, check_invariants=False
        )
        self.optimizer.step()


def cost(act: Callable[[], None]) -> float:
    start = time.process_time()
    act()
    return time.process_time() - start


def measure(name: str, count: int, messages: int, rounds: int, samples: Samples) -> None:
    made = np.random.default_rng(0)
    ids = np.unique(made.integers(-(2**63), 2**63 - 1, count + count // 50))[:count]
    order = made.permutation(count)
    ours, theirs = Ours(count, OPTIMIZERS[name][0]), Torch(count, OPTIMIZERS[name][1])
    grads = torch.randn(MESSAGE, DIM) * 0.01
    took = 0.0
    for first in range(0, count, MESSAGE):
        positions = np.sort(order[first : first + MESSAGE])
        gradient = grads[: len(positions)]
        took += cost(partial(ours.push, ids[positions], positions, gradient))
    samples.setdefault((f"{name}, uniform", "manyhands", "new_per_s"), []).append(count / took)
    for kind in ("uniform", "skewed"):
        for _ in range(rounds):
            spent, done = {"torch": 0.0, "manyhands": 0.0}, 0
            for _ in range(messages):
                even = made.integers(0, count, MESSAGE)
                chosen = even if kind == "uniform" else order[made.zipf(1.2, MESSAGE) % count]
                positions = np.unique(chosen)
                asked, gradient = ids[positions], grads[: len(positions)]
                done += len(positions)
                for contestant, who in (("torch", theirs), ("manyhands", ours)):
                    spent[contestant] += cost(partial(who.pull, asked, positions))
                    spent[contestant] += cost(partial(who.push, asked, positions, gradient))
            for contestant, seconds in spent.items():
                key = (f"{name}, {kind}", contestant, "per_s")
                samples.setdefault(key, []).append(done / seconds)


def reference(metric: str, values: Mapping[str, float]) -> float | None:
    return values.get("torch")


def main() -> None:
    parser = rows.arguments(__doc__, rounds=5)
    parser.add_argument("--rows", type=int, default=1_000_000, metavar="N", help="in the table")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    samples: Samples = {}
    for name in OPTIMIZERS:
        count, messages = (100_000, 20) if asked.quick else (asked.rows, 100)
        measure(name, count, messages, rows.rounds_of(asked), samples)
    rows.report(rows.summarise(samples, reference), METRICS, TARGETS, asked.json)


if __name__ == "__main__":
    main()
