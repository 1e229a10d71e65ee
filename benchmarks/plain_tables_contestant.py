# SPDX-License-Identifier: Apache-2.0
"""What people write today: one process, nn.Embedding(sparse=True), torch's optimizers.

    python plain_tables_contestant.py movielens --to FILE [--threads 1]

It saves weights and optimizers at the end, because ours does too.
"""

import argparse
from collections.abc import Iterator

import torch
from clock import Clock
from tables_work import BATCH, IDS, STEPS, in_a_loop, model, records
from torch import Tensor


def batches(data: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    dice = torch.Generator().manual_seed(0)
    while True:
        for some in torch.randperm(len(data["user"]), generator=dice).split(BATCH):
            yield {name: column.index_select(0, some) for name, column in data.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", choices=STEPS)
    parser.add_argument("--to", required=True)
    parser.add_argument("--threads", type=int)
    asked = parser.parse_args()
    if asked.threads is not None:
        torch.set_num_threads(asked.threads)
    clock, tables = Clock(), in_a_loop.Tables(IDS if asked.work == "million" else 200_000)
    torch.manual_seed(0)
    module, coming = model(asked.work, tables), batches(records(asked.work))
    optimizers = tables.optimizers(module)
    with torch.sparse.check_sparse_tensor_invariants(False):
        for _ in range(clock.steps):
            in_a_loop.step(module, optimizers, next(coming))
            clock.step()
    states = [optimizer.state_dict() for optimizer in optimizers]
    torch.save({"model": module.state_dict(), "optimizers": states}, asked.to)


if __name__ == "__main__":
    main()
