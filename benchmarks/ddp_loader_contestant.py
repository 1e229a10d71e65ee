# SPDX-License-Identifier: Apache-2.0
"""What people write today for data that is slow to fetch: DDP over gloo, and a DataLoader with
worker processes.

    torchrun --nproc_per_node 2 ddp_loader_contestant.py --loaders 2
"""

import argparse
import ctypes
import os
import signal
from collections.abc import Iterator

import torch
import torch.distributed as dist
from clock import Clock
from slow_data import data, work
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from works import LEARNING_RATE


def batches(loaders: int) -> Iterator[dict[str, Tensor]]:
    """This rank's, epoch after epoch."""
    sampler: DistributedSampler[dict[str, Tensor]] = DistributedSampler(data)
    loader = DataLoader(
        data,
        batch_size=work.batch // dist.get_world_size(),
        sampler=sampler,
        num_workers=loaders,
        persistent_workers=loaders > 0,
    )
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loaders", type=int, default=0)
    asked = parser.parse_args()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    torch.manual_seed(0)
    clock, module = Clock(), work.model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, fused=True)
    dist.init_process_group("gloo")
    model, mine = DistributedDataParallel(module), batches(asked.loaders)
    for _ in range(clock.steps):
        batch = next(mine)
        optimizer.zero_grad()
        work.loss(model, batch).backward()
        optimizer.step()
        clock.step()
    os._exit(0)


if __name__ == "__main__":
    main()
