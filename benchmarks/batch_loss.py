# SPDX-License-Identifier: Apache-2.0
"""What a loss over the whole batch costs: `python benchmarks/batch_loss.py`.

A step with gradient caching (`embed` and `batch_loss`) beside a plain step of the same towers plus
one forward more: wanted is 1.1 x of that at the most. One worker, one thread, eight micro-batches,
in this process; the three take turns, step by step, and medians of processor time are compared.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))

from manyhands.accounting.deal_micro_batches import Cut, MicroBatch
from manyhands.training.memory.memory import Memory
from manyhands.training.state.replica import Replica
from manyhands.training.sync.cached_gradients import CachedGradients
from manyhands.training.sync.leaf_gradients import LeafGradients, PlainGradients
from manyhands.values.config import TrainConfig
from manyhands.values.task import BatchLoss

BATCH, PARTS = 256, 8


class Unwatched:
    def batch_loss(self, step: Cut) -> None: ...

    def again(self, step: Cut, micro_batches: Sequence[MicroBatch]) -> Iterator[MicroBatch]:
        yield from micro_batches


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(256, 1024), nn.ReLU(), nn.Dropout(0.1), nn.Linear(1024, 1024)]
        self.tower = nn.Sequential(*layers, nn.ReLU(), nn.Linear(1024, 128))
        self.heat = nn.Parameter(torch.zeros(()))


def embed(model: Any, batch: Any) -> tuple[Tensor, Tensor]:
    return model.tower(batch["a"]), model.tower(batch["b"])


def compare(model: Any, a: Tensor, b: Tensor) -> Tensor:
    scores = F.normalize(a, dim=1) @ F.normalize(b, dim=1).T * model.heat.exp()
    return F.cross_entropy(scores, torch.arange(len(scores)))


def step(
    leaves: LeafGradients, replica: Replica, cut: Cut, parts: list[MicroBatch], loss: Any
) -> None:
    for micro_batch in leaves.begin(cut, parts, loss, None):
        leaves.compute(cut, micro_batch, loss)
    for parameter in replica.parameters.values():
        parameter.grad = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    train = TrainConfig(batch=BATCH, micro_batch=BATCH // PARTS)
    model = Towers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replica = Replica(model, optimizer, None, Memory(None), torch.device("cpu"), protect=True)
    replica.publish()
    replica.adopt()
    cut = Cut(0, 0, 0, (BATCH // PARTS,) * PARTS, 0)
    data = [{name: torch.randn(BATCH // PARTS, 256) for name in "ab"} for _ in range(PARTS)]
    parts = [MicroBatch(0, k, BATCH // PARTS, 1 / PARTS, 0, batch) for k, batch in enumerate(data)]
    plain, cached = PlainGradients(replica, train), CachedGradients(replica, train, Unwatched())
    whole = BatchLoss(embed, compare)

    def forward() -> None:
        with torch.no_grad():
            for batch in data:
                embed(model, batch)

    contestants: dict[str, Callable[[], None]] = {
        "a plain step": lambda: step(plain, replica, cut, parts, whole.__call__),
        "a forward": forward,
        "gradient caching": lambda: step(cached, replica, cut, parts, whole),
    }
    took: dict[str, list[float]] = {name: [] for name in contestants}
    for round in range(rounds + 2):
        for name, run in contestants.items():
            started = time.process_time()
            run()
            if round >= 2:
                took[name].append(time.process_time() - started)
    middle = {name: statistics.median(times) for name, times in took.items()}
    for name, seconds in middle.items():
        print(f"{name}: {seconds * 1e3:.1f} ms")
    pairs = zip(*took.values(), strict=True)
    ratio = statistics.median(c / (a + b) for a, b, c in pairs)
    print(f"gradient caching / (a plain step + a forward): {ratio:.2f} (at most 1.1)")


if __name__ == "__main__":
    main()
