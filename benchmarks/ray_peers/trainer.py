# SPDX-License-Identifier: Apache-2.0
"""A work of the benchmarks under Ray Train: a TorchTrainer on a Ray of its own.

python trainer.py WORK FOLDER
"""

import os
import sys
from pathlib import Path

HERE = Path(__file__).parent.parent


def loop(how: dict[str, str]) -> None:
    sys.path.insert(0, str(HERE))
    import torch
    import torch.distributed as dist
    from clock import Clock
    from ddp_contestant import batches
    from ray.train.torch import prepare_model
    from works import LEARNING_RATE, WORKS

    work, clock = WORKS[how["work"]], Clock()
    torch.manual_seed(0)
    model, data = prepare_model(work.model()), work.data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    records = len(next(iter(data.values())))
    mine = batches(records, work.batch, rank=dist.get_rank(), num_ranks=dist.get_world_size())
    for _ in range(clock.steps):
        rows = next(mine)
        batch = {name: column.index_select(0, rows) for name, column in data.items()}
        optimizer.zero_grad()
        work.loss(model, batch).backward()
        optimizer.step()
        clock.step()


def main() -> None:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    from manyhands.launch.ray.ray_session import Session

    work, folder = sys.argv[1:]
    session = Session(None)
    TorchTrainer(
        loop,
        train_loop_config={"work": work},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=folder, name="run"),
    ).fit()
    session.close()


if __name__ == "__main__":
    os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
    main()
