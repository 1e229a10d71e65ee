# SPDX-License-Identifier: Apache-2.0
"""Workers with memory of their own, over torch.distributed: gloo on CPUs, NCCL on GPUs.

Every worker holds the whole state, so any of them can bring a newcomer up to date. Subtree sums
travel point to point (each worker sends every other the stretch that one finishes), and so do the
finished gradients: as many bytes as a ring allreduce moves. Gloo neither authenticates nor
encrypts; it listens at `address`. Members meet through a file, so all must see the run's folder.

NCCL takes the same path with device tensors. It is written and has not been tried.
"""

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from manyhands.training.collective.collective import (
    FACTS,
    Bytes,
    Meanwhile,
    Patience,
    Sizes,
    nothing,
    stretch,
)
from manyhands.training.state.layout import Bounds, Lanes
from manyhands.values.errors import Broken
from manyhands.values.world import World

torch_distributed: Any = dist
"""For the parts of it that its types do not tell of."""

MEET_S = 10
"""Members of a view are ready when it is issued; one that does not come by then has died."""


class TorchGroup:
    def __init__(
        self,
        world: World,
        slots: Sequence[Lanes],
        *,
        backend: str,
        rendezvous: Path,
        address: str = "127.0.0.1",
        device: torch.device,
        patience: Patience,
        timeout_s: float = 1800,
    ) -> None:
        self.world, self.device, self.patience = world, device, patience
        self.slots = slots
        if dist.is_initialized():  # of the view before this one
            dist.destroy_process_group()
        store = torch_distributed.FileStore(str(rendezvous), world.num_ranks)
        options = None
        if backend == "gloo":
            gloo = torch_distributed.ProcessGroupGloo
            options = gloo._Options()
            options._devices = [gloo.create_device(hostname=address)]
            options._timeout = timedelta(seconds=MEET_S)
        with self.patience, _broken_by_peers():
            dist.init_process_group(
                backend,
                store=store,
                rank=world.rank,
                world_size=world.num_ranks,
                timeout=timedelta(seconds=MEET_S),
                pg_options=options,
            )
        # Meeting is quick or never; from here on, steps may take their time.
        torch_distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s))
        self._received: dict[tuple[int, int, torch.dtype], Tensor] = {}

    def gather(
        self, mine: Bytes, kind: int = FACTS, stamp: int = 0, meanwhile: Meanwhile = nothing
    ) -> list[Bytes]:
        meanwhile()
        sent = torch.from_numpy(mine).to(self.device)
        everyone = torch.empty(self.world.num_ranks, len(mine), dtype=torch.uint8)
        everyone = everyone.to(self.device)
        with self.patience, _broken_by_peers():
            dist.all_gather(list(everyone), sent)  # `all_gather_single` is not in torch 2.12
        return [row.numpy() for row in everyone.cpu()]

    def exchange(self, counts: Sequence[int], owned: Sequence[Bounds]) -> list[list[Lanes]]:
        me, mine = self.world.rank, owned[self.world.rank]
        parts: list[list[Lanes]] = []
        sends: list[tuple[Tensor, int]] = []
        receives: list[tuple[Tensor, int]] = []
        for rank, count in enumerate(counts):
            if rank == me:
                parts.append([stretch(slot, mine) for slot in self.slots[:count]])
                continue
            for slot in self.slots[: counts[me]]:
                sends += [(t, rank) for t in stretch(slot, owned[rank]).values()]
            theirs = [{d: self._room(rank, k, d, *mine[d]) for d in mine} for k in range(count)]
            receives += [(t, rank) for lanes in theirs for t in lanes.values()]
            parts.append(theirs)
        self._move(sends, receives)
        return parts

    def share(self, lanes: Lanes, owned: Sequence[Bounds]) -> None:
        me = self.world.rank
        others = [rank for rank in range(self.world.num_ranks) if rank != me]
        mine = stretch(lanes, owned[me])
        self._move(
            [(tensor, rank) for rank in others for tensor in mine.values()],
            [(tensor, rank) for rank in others for tensor in stretch(lanes, owned[rank]).values()],
        )

    def recall(self, kind: int, stamp: int) -> list[Bytes]:
        return []

    def left_by(self, rank: int) -> Sequence[Lanes]:
        raise NotImplementedError("what a worker writes here goes with it")

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def _room(self, rank: int, k: int, dtype: torch.dtype, start: int, stop: int) -> Tensor:
        key = (rank, k, dtype)
        if key not in self._received or len(self._received[key]) != stop - start:
            self._received[key] = torch.empty(stop - start, dtype=dtype, device=self.device)
        return self._received[key]

    def _move(self, sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]]) -> None:
        operations = [dist.P2POp(dist.isend, t, rank) for t, rank in sends if t.numel()]
        operations += [dist.P2POp(dist.irecv, t, rank) for t, rank in receives if t.numel()]
        if not operations:
            return
        with self.patience, _broken_by_peers():
            for work in dist.batch_isend_irecv(operations):
                work.wait()


class DeviceSlots(Sequence[Lanes]):
    """Partial sums in memory of a device's own, made when they are first used: most workers need
    one or two."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self.sizes, self.device = sizes, device
        self._made: list[Lanes] = []

    def __len__(self) -> int:
        return self.sizes.slots

    def __getitem__(self, k: Any) -> Any:
        if isinstance(k, slice):
            return [self[i] for i in range(*k.indices(len(self)))]
        while len(self._made) <= k:
            lanes = self.sizes.lanes.items()
            self._made.append({d: torch.zeros(n, dtype=d, device=self.device) for d, n in lanes})
        return self._made[k]


class _broken_by_peers:  # noqa: N801 (reads as a statement)
    """A lost connection is a symptom; the supervisor knows the cause."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError):
            raise Broken(f"the exchange with other workers failed: {error}") from error
