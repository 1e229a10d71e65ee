# SPDX-License-Identifier: Apache-2.0
"""Hosts over MPI (mpi4py), for clusters whose network is best reached that way.

Everything goes point to point and is polled: a collective operation of MPI can neither be cancelled
nor be broken off without leaving the communicator out of step. Messages carry the view's generation
as their tag, so that what is left of a broken view is not taken for a newer one's. Nothing is
received straight into memory of the caller: a transfer that was broken off can still arrive, and
does. For `share` this costs a copy (7 ms for 50 MB).

Tried with Open MPI 4.1.4 and mpi4py 4.1.2, on one host, over shared memory and over TCP:

- A worker that a host agent has forked can be the one that initialises MPI, under a driver that
  mpirun started. It takes that driver's place among MPI's ranks.
- It can do so once. A second worker of the same driver (a replacement) is ended by MPI_Init with
  exit code 1; the other ranks do not notice.
- mpirun watches only the process it started. When that one is killed, all others get SIGTERM and
  are killed, unless it was given --enable-recovery (or --continuous). A forked worker may be killed
  without the flag too; the job is ended when its driver ends, because it did not `finish`.
- Whoever survives sees nothing: no error, transfers from and to the dead never end. Their
  patience must. Survivors still reach each other, and `comm.Create_group` without the dead makes a
  communicator for the next view; it blocks until all its members call it.
- A receive that was not answered can be cancelled, a send cannot.
"""

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from manyhands.training.collective.collective import (
    FACTS,
    Bytes,
    Meanwhile,
    Patience,
    nothing,
    stretch,
)
from manyhands.training.state.layout import Bounds, Lanes
from manyhands.values.errors import Broken, RequestError
from manyhands.values.world import World

if TYPE_CHECKING:
    from mpi4py import MPI

SPIN_S = 100e-6
LEAST_NAP_S, MOST_NAP_S = 20e-6, 500e-6
"""MPI moves bytes only while it is asked: 50 MB over loopback took 22 ms when asked without pause,
38 ms with pauses of 200 µs and 75 ms with pauses of 5 ms."""

PIECE_BYTES = 1 << 30
"""MPI counts in 32 bits; larger stretches go in several messages."""

SentBytes = tuple[Bytes, int]
"""Bytes to be sent or filled, and the rank at the other end."""

_adrift: "list[MPI.Request]" = []
"""Transfers that were broken off and could not be cancelled. They hold on to their memory."""


class Mpi:
    def __init__(
        self,
        world: World,
        slots: Sequence[Lanes],
        *,
        patience: Patience,
        comm: "MPI.Comm | None" = None,
        generation: int = 0,
    ) -> None:
        """`slots` are in the host's memory. `comm`: all members, each once; else COMM_WORLD."""
        self.world, self.slots, self.patience = world, slots, patience
        self._mpi = mpi = load_mpi()
        self.comm: MPI.Comm = comm if comm is not None else mpi.COMM_WORLD
        self.comm.Set_errhandler(mpi.ERRORS_RETURN)
        most: Any = self.comm.Get_attr(mpi.TAG_UB)
        self.tag = generation % (int(most) + 1)
        self._rooms: dict[tuple[str, int, int, torch.dtype], Tensor] = {}
        self._at = self._places()

    def _places(self) -> list[int]:
        """Where each rank is found: MPI counts its ranks in an order of its own."""
        here, num_ranks = self.comm.Get_rank(), self.world.num_ranks
        if self.comm.Get_size() != num_ranks:
            raise Broken(
                f"this view has {num_ranks} hosts and MPI has {self.comm.Get_size()}: "
                "somebody is missing, or is not meant"
            )
        self._at = list(range(num_ranks))
        told = self._everyones(np.array([self.world.rank], dtype=np.int64).view(np.uint8), here)
        ranks = [int(row.view(np.int64)[0]) for row in told]
        if sorted(ranks) != list(range(num_ranks)):
            missing = sorted(set(range(num_ranks)) - set(ranks))
            are = "is" if len(missing) == 1 else "are"
            raise Broken(
                f"{_hosts(missing)} of this view {are} missing: MPI's members say that they are "
                f"{_hosts(ranks)}"
            )
        return [ranks.index(rank) for rank in range(num_ranks)]

    def gather(
        self, mine: Bytes, kind: int = FACTS, stamp: int = 0, meanwhile: Meanwhile = nothing
    ) -> list[Bytes]:
        return self._everyones(mine, self.world.rank, meanwhile)

    def _everyones(self, mine: Bytes, me: int, meanwhile: Meanwhile = nothing) -> list[Bytes]:
        rows = np.empty((self.world.num_ranks, len(mine)), dtype=np.uint8)
        rows[me] = mine
        others = [rank for rank in range(len(rows)) if rank != me]
        sends = [(rows[me], rank) for rank in others]
        self._move(sends, [(rows[rank], rank) for rank in others], meanwhile)
        return list(rows)

    def exchange(self, counts: Sequence[int], owned: Sequence[Bounds]) -> list[list[Lanes]]:
        me, mine = self.world.rank, owned[self.world.rank]
        parts: list[list[Lanes]] = []
        sends: list[SentBytes] = []
        receives: list[SentBytes] = []
        for rank, count in enumerate(counts):
            if rank == me:
                parts.append([stretch(self.slots[k], mine) for k in range(count)])
                continue
            for k in range(counts[me]):
                sends += _parcels(stretch(self.slots[k], owned[rank]), rank)
            theirs = [self._room("exchange", rank, k, mine) for k in range(count)]
            for lanes in theirs:
                receives += _parcels(lanes, rank)
            parts.append(theirs)
        self._move(sends, receives)
        return parts

    def share(self, lanes: Lanes, owned: Sequence[Bounds]) -> None:
        me = self.world.rank
        others = [rank for rank in range(self.world.num_ranks) if rank != me]
        mine = stretch(lanes, owned[me])
        theirs = {rank: self._room("share", rank, 0, owned[rank]) for rank in others}
        self._move(
            [parcel for rank in others for parcel in _parcels(mine, rank)],
            [parcel for rank in others for parcel in _parcels(theirs[rank], rank)],
        )
        with torch.no_grad():
            for rank, received in theirs.items():
                for dtype, tensor in stretch(lanes, owned[rank]).items():
                    tensor.copy_(received[dtype])

    def recall(self, kind: int, stamp: int) -> list[Bytes]:
        return []

    def left_by(self, rank: int) -> Sequence[Lanes]:
        raise NotImplementedError("what a host writes is in its own memory")

    def close(self) -> None:
        """MPI stays: it can be initialised once in a process. `finish` ends it."""
        self._rooms.clear()

    def _room(self, use: str, rank: int, k: int, bounds: Bounds) -> Lanes:
        """Memory for a stretch that comes from `rank`; as large as the largest so far."""
        room: Lanes = {}
        for dtype, (start, stop) in bounds.items():
            key = use, rank, k, dtype
            if key not in self._rooms or len(self._rooms[key]) < stop - start:
                self._rooms[key] = torch.empty(stop - start, dtype=dtype)
            room[dtype] = self._rooms[key][: stop - start]
        return room

    def _move(
        self, sends: list[SentBytes], receives: list[SentBytes], meanwhile: Meanwhile = nothing
    ) -> None:
        comm, byte, tag = self.comm, self._mpi.BYTE, self.tag
        coming: list[tuple[int, MPI.Request]] = []
        going: list[tuple[int, MPI.Request]] = []
        try:
            for piece, rank in _pieces(receives):
                coming.append((rank, comm.Irecv([piece, byte], self._at[rank], tag)))
            for piece, rank in _pieces(sends):
                going.append((rank, comm.Isend([piece, byte], self._at[rank], tag)))
            meanwhile()
            self._wait(coming + going)
        except BaseException as error:
            self._abandon([r for _, r in coming], [r for _, r in going])
            if isinstance(error, self._mpi.Exception):
                raise Broken(f"the exchange with other hosts failed: {error}") from error
            raise

    def _wait(self, moving: "list[tuple[int, MPI.Request]]") -> None:
        requests = [request for _, request in moving]
        all_done, started = self._mpi.Request.Testall, time.perf_counter()
        while time.perf_counter() - started < SPIN_S:
            if all_done(requests):
                return
        with self.patience:
            while not all_done(requests):
                if self.patience.broken():
                    late = sorted({rank for rank, request in moving if not request.Get_status()})
                    raise Broken(f"waiting for {_hosts(late)} was broken off")
                nap_s = (time.perf_counter() - started) / 100
                time.sleep(min(MOST_NAP_S, max(LEAST_NAP_S, nap_s)))

    def _abandon(self, coming: "list[MPI.Request]", going: "list[MPI.Request]") -> None:
        """Cancel what can be: receives that nobody has answered yet. The rest may still move."""
        for request in coming:
            with suppress(self._mpi.Exception):
                if request != self._mpi.REQUEST_NULL:
                    request.Cancel()
        _adrift[:] = [r for r in (*_adrift, *coming, *going) if not self._over(r)]

    def _over(self, request: "MPI.Request") -> bool:
        try:
            return request.Test()
        except self._mpi.Exception:
            return False


def load_mpi() -> Any:
    """mpi4py.MPI. The first call in a process initialises MPI there, which is for good."""
    try:
        import mpi4py

        mpi4py.rc.thread_level = "serialized"  # a worker and its courier, one at a time
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: no libmpi where mpi4py looks
        why = str(error).splitlines()[0]
        raise RequestError(
            f"MPI cannot be used: {why}. It needs mpi4py (pip install 'manyhands[mpi]') and an "
            "MPI library (Debian, Ubuntu: apt install openmpi-bin, which brings libopenmpi)."
        ) from error
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        raise RequestError(
            "MPI was initialised before, for one thread only. Set mpi4py.rc.thread_level = "
            "'serialized' before importing mpi4py.MPI, or do not import it in the task."
        )
    return MPI


def finish() -> None:
    """Before the process ends, if it used MPI. Blocks until all living members are there too."""
    mpi: Any = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()


def _parcels(lanes: Lanes, rank: int) -> list[SentBytes]:
    """As bytes: numpy knows no bfloat16, and MPI need not know what it carries."""
    return [(t.detach().view(torch.uint8).numpy(), rank) for t in lanes.values() if t.numel()]


def _pieces(parcels: Iterable[SentBytes]) -> Iterator[SentBytes]:
    for content, rank in parcels:
        for start in range(0, len(content), PIECE_BYTES):
            yield content[start : start + PIECE_BYTES], rank


def _hosts(ranks: Sequence[int]) -> str:
    return f"host{'s' if len(ranks) > 1 else ''} {', '.join(str(rank) for rank in ranks)}"
