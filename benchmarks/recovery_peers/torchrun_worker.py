# SPDX-License-Identifier: Apache-2.0
"""DistributedDataParallel under torchrun's elastic agent, with checkpoints as people write them.

    torchrun --nproc_per_node 2 --max-restarts 3 torchrun_worker.py CHECKPOINT

When a worker dies the agent ends the others and starts all of them anew; they go on from the file.
"""

import os
import sys

import diary
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from works import LEARNING_RATE, WORKS


def main() -> None:
    diary.die_with_parent()
    file, every, work = sys.argv[1], int(os.environ[diary.EVERY]), WORKS[diary.WORK]
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    module, done = work.model(), 0
    optimizer = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, fused=True)
    if os.path.exists(file):
        saved = torch.load(file)
        module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["done"]
    model = DistributedDataParallel(module)
    for batch in diary.batches_from(done, rank=rank, num_ranks=num_ranks, data=work.data()):
        diary.note(done, rank)
        optimizer.zero_grad()
        work.loss(model, batch).backward()
        optimizer.step()
        done += 1
        if rank == 0 and done % every == 0:
            state = {"model": module.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "done": done}, f"{file}.draft")
            os.replace(f"{file}.draft", file)


if __name__ == "__main__":
    main()
