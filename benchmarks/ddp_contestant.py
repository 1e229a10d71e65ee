# SPDX-License-Identifier: Apache-2.0
"""What people write today: a DistributedDataParallel loop over gloo, started by torchrun.

    torchrun --nproc_per_node 2 ddp_contestant.py mlp --to FILE [--fused] [--wrap accelerate]
                                                      [--compile inside|whole]

Each rank takes its part of every shuffled batch straight from memory, as cheaply as can be: no
DataLoader. Rank 0 saves weights and optimizer at the end, because ours does too. `--wrap` has the
same loop wrapped by Accelerate or Lightning Fabric instead. `--compile` compiles the model inside
DDP (`model.compile()`), or DDP with it (`torch.compile(DDP(model))`), cut at DDP's buckets.
"""

import argparse
import ctypes
import os
import signal
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from clock import Clock
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from works import LEARNING_RATE, WORKERS, WORKS

Wrapped = tuple[nn.Module, Optimizer, Callable[[Tensor], object]]


def bare(model: nn.Module, optimizer: Optimizer) -> Wrapped:
    dist.init_process_group("gloo")
    return DistributedDataParallel(model), optimizer, lambda loss: loss.backward()


def accelerate(model: nn.Module, optimizer: Optimizer) -> Wrapped:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    return model, optimizer, accelerator.backward


def lightning(model: nn.Module, optimizer: Optimizer) -> Wrapped:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=WORKERS, strategy="ddp")
    fabric.launch()
    model, optimizer = fabric.setup(model, optimizer)
    return model, optimizer, fabric.backward


WRAPS = {"bare": bare, "accelerate": accelerate, "lightning": lightning}


def batches(records: int, batch: int, *, rank: int, num_ranks: int) -> Iterator[Tensor]:
    """This rank's record numbers, step after step, reshuffled every epoch."""
    dice = torch.Generator().manual_seed(0)
    share = batch // num_ranks
    while True:
        order = torch.randperm(records, generator=dice)
        for start in range(rank * share, records, batch):
            yield order[start : start + share]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", choices=WORKS)
    parser.add_argument("--to", required=True)
    parser.add_argument("--fused", action="store_true")
    parser.add_argument("--wrap", choices=WRAPS, default="bare")
    parser.add_argument("--compile", choices=["inside", "whole"])
    asked = parser.parse_args()
    # torchrun's workers outlive a torchrun that is killed, and would go on to spoil the next round.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)

    work, clock = WORKS[asked.work], Clock()
    torch.manual_seed(0)
    module, data = work.model(), work.data()
    fused = True if asked.fused else None  # None is what AdamW itself would choose
    optimizer = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, fused=fused)
    if asked.compile == "inside":
        module.compile()
    model, optimizer, backward = WRAPS[asked.wrap](module, optimizer)
    if asked.compile == "whole":
        model.compile()
    records = len(next(iter(data.values())))
    mine = batches(records, work.batch, rank=dist.get_rank(), num_ranks=dist.get_world_size())
    for _ in range(clock.steps):
        rows = next(mine)
        batch = {name: column.index_select(0, rows) for name, column in data.items()}
        optimizer.zero_grad()
        backward(work.loss(model, batch))
        optimizer.step()
        clock.step()
    if dist.get_rank() == 0:
        torch.save({"model": module.state_dict(), "optimizer": optimizer.state_dict()}, asked.to)
    # Not destroy_process_group: now and then the last reference to gloo's group then goes with the
    # GIL held, which its threads wait for. https://github.com/pytorch/pytorch/issues/56297
    os._exit(0)


if __name__ == "__main__":
    main()
