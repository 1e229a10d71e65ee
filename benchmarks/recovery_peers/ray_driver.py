# SPDX-License-Identifier: Apache-2.0
"""Ray Train: a TorchTrainer with two workers on a cluster of its own, on this host.

    python ray_driver.py FOLDER

When a worker dies the controller starts a new group of workers; they go on from the newest
checkpoint that was reported. FOLDER must have a short path: Ray puts sockets below it.
"""

import os
import sys
import tempfile
from pathlib import Path

import diary
import ray
import torch
from ray import train
from ray.train.torch import TorchTrainer, prepare_model
from works import LEARNING_RATE, WORKERS, WORKS


def work_loop(config: dict[str, int]) -> None:
    context, work = train.get_context(), WORKS[diary.WORK]
    rank, num_ranks = context.get_world_rank(), context.get_world_size()
    torch.manual_seed(0)
    module, done = work.model(), 0
    optimizer = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, fused=True)
    if (checkpoint := train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder) / "saved.pt")
        module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["done"]
    model = prepare_model(module)
    for batch in diary.batches_from(done, rank=rank, num_ranks=num_ranks, data=work.data()):
        diary.note(done, rank)
        optimizer.zero_grad()
        work.loss(model, batch).backward()
        optimizer.step()
        done += 1
        if done % config["every"] == 0:
            report(module, optimizer, done, saves=rank == 0)


def report(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer, done: int, *, saves: bool
) -> None:
    """Ray wants to hear from every worker; one of them brings the checkpoint."""
    if not saves:
        return train.report({"done": done})
    with tempfile.TemporaryDirectory() as folder:
        state = {"model": module.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "done": done}, Path(folder) / "saved.pt")
        train.report({"done": done}, checkpoint=train.Checkpoint.from_directory(folder))


def main() -> None:
    folder = Path(sys.argv[1])
    ray.init(
        num_cpus=WORKERS,
        include_dashboard=False,
        object_store_memory=100_000_000,
        _temp_dir=str(folder / "ray"),
    )
    trainer = TorchTrainer(
        work_loop,
        train_loop_config={"every": int(os.environ[diary.EVERY])},
        scaling_config=train.ScalingConfig(num_workers=WORKERS),
        run_config=train.RunConfig(
            name="recovery",
            storage_path=str(folder / "storage"),
            failure_config=train.FailureConfig(max_failures=3),
            checkpoint_config=train.CheckpointConfig(num_to_keep=2),
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
