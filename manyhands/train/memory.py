# SPDX-License-Identifier: Apache-2.0
"""Where flat vectors live: memory shared by the workers of a host, or a worker's own.

Shared memory is one memfd that the host's agent holds, so it outlives every worker and leaks
nothing into /dev/shm. Regions are taken in the same order with the same sizes by every worker, so
they all compute the same offsets and no one has to tell anyone. Pages that nobody writes to do not
exist: reserving generously costs nothing.
"""

import mmap
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

PAGE = mmap.ALLOCATIONGRANULARITY


class Memory:
    """Hands out zeroed tensors. With a file descriptor they are shared, without it private."""

    def __init__(self, fd: int | None) -> None:
        self.fd, self.taken = fd, 0

    @property
    def shared(self) -> bool:
        return self.fd is not None

    def tensor(self, *shape: int, dtype: torch.dtype) -> Tensor:
        nbytes = prod(shape) * dtype.itemsize
        if nbytes == 0:
            return torch.zeros(shape, dtype=dtype)
        return torch.frombuffer(self._region(nbytes), dtype=dtype, count=prod(shape)).view(shape)

    def array(self, *shape: int, dtype: type[np.generic]) -> NDArray[np.generic]:
        region = self._region(max(1, prod(shape)) * np.dtype(dtype).itemsize)
        return np.frombuffer(region, dtype=dtype, count=prod(shape)).reshape(shape)

    def _region(self, nbytes: int) -> mmap.mmap:
        length = -(-nbytes // PAGE) * PAGE
        if self.fd is None:
            return mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        offset, self.taken = self.taken, self.taken + length
        return mmap.mmap(self.fd, length, flags=mmap.MAP_SHARED, offset=offset)
