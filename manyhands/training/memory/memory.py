# SPDX-License-Identifier: Apache-2.0
"""Memory that workers of a host share, or that one worker has to itself.

Workers call for the same things in the same order, so the n-th call gets the same place in each of
them, also in one that is started later. Nothing asked for may depend on how many workers there
are: room is made for the most there can be. That costs nothing, because the segment is sparse and
only pages that are written to take memory.
"""

import mmap
import os
import warnings
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from manyhands.values.byte_sizes import shown_bytes
from manyhands.values.errors import ConfigError
from manyhands.values.machine import MOST_RANKS

PAGE = mmap.ALLOCATIONGRANULARITY


@dataclass(frozen=True, slots=True)
class Room:
    """How much of a segment may be taken, and what to do where that is too little."""

    size_bytes: int
    remedy: str


class Memory:
    """Hands out zeroed tensors. With a file descriptor they are shared, without it private."""

    def __init__(self, fd: int | None, room: Room | None = None) -> None:
        """`room`: of the segment; left out: all that there is."""
        self.fd, self.room, self.taken = fd, room, 0

    @property
    def shared(self) -> bool:
        return self.fd is not None

    def twins(self, size: int, *, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """One vector, mapped twice: to be written to, and to be read only. A store to the second
        ends the process (SIGSEGV)."""
        nbytes = max(1, size * dtype.itemsize)
        shelf = self.shelf(1, nbytes)
        if shelf.fd is None:
            shelf.fd = os.memfd_create("weights")  # closed by `readable`
            os.ftruncate(shelf.fd, shelf.length)
            shelf.offset = 0
        writable = shelf.tensor(0, size, dtype=dtype)
        return writable, shelf.readable(size, dtype=dtype, close=self.fd is None)

    def tensor(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return self.shelf(1, prod(shape) * dtype.itemsize).tensor(0, *shape, dtype=dtype)

    def array(self, *shape: int, dtype: type[np.generic]) -> NDArray[np.generic]:
        nbytes = prod(shape) * np.dtype(dtype).itemsize
        return self.shelf(1, nbytes).array(0, *shape, dtype=dtype)

    def shelf(self, count: int, nbytes: int) -> "Boxes":
        """Room for `count` boxes of `nbytes` each; a box is mapped when it is first opened."""
        length = -(-max(1, nbytes) // PAGE) * PAGE
        offset, self.taken = self.taken, self.taken + count * length
        if self.room is not None and self.taken > self.room.size_bytes:
            raise ConfigError(
                f"the state takes {shown_bytes(self.taken)} or more of the addresses in memory "
                f"that workers of a host share (there is room for {MOST_RANKS} of them), and may "
                f"take {shown_bytes(self.room.size_bytes)}. {self.room.remedy}"
            )
        return Boxes(self.fd, offset, count, length)


class Boxes:
    def __init__(self, fd: int | None, offset: int, count: int, length: int) -> None:
        self.fd, self.offset, self.count, self.length = fd, offset, count, length
        self._open: dict[int, mmap.mmap] = {}

    def box(self, k: int) -> mmap.mmap:
        assert 0 <= k < self.count, f"box {k} of {self.count}"
        if k not in self._open:
            if self.fd is None:
                flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
                self._open[k] = mmap.mmap(-1, self.length, flags=flags)
            else:
                offset = self.offset + k * self.length
                shared = mmap.MAP_SHARED
                self._open[k] = mmap.mmap(self.fd, self.length, flags=shared, offset=offset)
        return self._open[k]

    def readable(self, size: int, *, dtype: torch.dtype, close: bool) -> Tensor:
        """The first box once more, without the right to write."""
        assert self.fd is not None
        box = mmap.mmap(
            self.fd, self.length, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=self.offset
        )
        if close:  # mappings stay
            os.close(self.fd)
            self.fd = None
        if size == 0:
            return torch.zeros(0, dtype=dtype)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "not writable": as it should be
            return torch.frombuffer(box, dtype=dtype, count=size)

    def tensor(self, k: int, *shape: int, dtype: torch.dtype, at: int = 0) -> Tensor:
        if prod(shape) == 0:
            return torch.zeros(shape, dtype=dtype)
        whole = torch.frombuffer(self.box(k), dtype=dtype, count=prod(shape), offset=at)
        return whole.view(shape)

    def array(
        self, k: int, *shape: int, dtype: type[np.generic], at: int = 0
    ) -> NDArray[np.generic]:
        return np.frombuffer(self.box(k), dtype=dtype, count=prod(shape), offset=at).reshape(shape)
