# SPDX-License-Identifier: Apache-2.0
"""What a worker writes down: a line for every step that it begins, into a file of its own.

    <nanoseconds of CLOCK_MONOTONIC> <optimizer steps that are done>

Whoever begins step s + 1 proves that step s is done, for every contestant alike. The file is named
`<rank>-<process>`, with `x` for a rank that the worker does not know.
"""

import ctypes
import os
import signal
import time
from collections.abc import Iterator
from itertools import islice

import torch
from ddp_contestant import batches
from torch import Tensor
from works import WORKS

FOLDER, EVERY, WORK = "BENCHMARK_DIARIES", "BENCHMARK_CHECKPOINT_EVERY", "mlp"

_files: dict[int, int] = {}
"""process → file: a module may be inherited by fork."""


def note(done: int, rank: int | str = "x") -> None:
    pid = os.getpid()
    if pid not in _files:
        path = os.path.join(os.environ[FOLDER], f"{rank}-{pid}")
        _files[pid] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(_files[pid], b"%d %d\n" % (time.monotonic_ns(), done))


def batches_from(
    done: int, *, rank: int, num_ranks: int, data: dict[str, Tensor]
) -> Iterator[dict[str, Tensor]]:
    """This rank's part of every batch, from step `done` on."""
    torch.set_num_threads(1)
    records = len(next(iter(data.values())))
    order = batches(records, WORKS[WORK].batch, rank=rank, num_ranks=num_ranks)
    for rows in islice(order, done, None):
        yield {name: column.index_select(0, rows) for name, column in data.items()}


def die_with_parent() -> None:
    """Linux: workers outlive a launcher that is killed, and would spoil the next round."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
