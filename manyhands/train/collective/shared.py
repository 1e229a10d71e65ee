# SPDX-License-Identifier: Apache-2.0
"""Workers of one host, over shared memory: nothing is sent, everyone reads where others wrote.

One copy of the weights serves all workers, so `share` is only a meeting. A step costs two meetings
(`gather`, `share`), and each byte of gradient is read once by the worker that owns it.
"""

from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from manyhands.train.collective.contract import Bounds, Bytes, Lanes, Sizes, stretch
from manyhands.train.collective.words import STRIDE, Words
from manyhands.train.memory import Memory
from manyhands.world import World


class Shared:
    def __init__(
        self,
        world: World,
        memory: Memory,
        sizes: Sizes,
        *,
        spin: bool,
        broken: Callable[[], bool],
    ) -> None:
        self.world, self._aborted = world, False
        words = memory.array(world.num_ranks * STRIDE, dtype=np.uint32)
        self.words = Words(
            cast(NDArray[np.uint32], words),
            world.rank,
            spin=spin,
            broken=lambda: self._aborted or broken(),
        )
        # Two tables in turn: a worker can be one meeting ahead of those still reading, not two.
        tables = memory.array(2, world.num_ranks, sizes.message_bytes, dtype=np.uint8)
        self.tables = cast(Bytes, tables)
        lanes = {
            dtype: memory.tensor(world.num_ranks, sizes.slots, size, dtype=dtype)
            for dtype, size in sizes.lanes.items()
        }
        self.all_slots: list[list[Lanes]] = [
            [{dtype: lane[rank, k] for dtype, lane in lanes.items()} for k in range(sizes.slots)]
            for rank in range(world.num_ranks)
        ]
        self.slots: Sequence[Lanes] = self.all_slots[world.rank]

    def gather(self, mine: Bytes) -> list[Bytes]:
        table = self.tables[self.words.sequence % 2]
        table[self.world.rank, : len(mine)] = mine
        self._meet()
        return [table[rank, : len(mine)] for rank in range(self.world.num_ranks)]

    def exchange(self, counts: Sequence[int], owned: Sequence[Bounds]) -> list[list[Lanes]]:
        mine = owned[self.world.rank]
        return [
            [stretch(slot, mine) for slot in slots[:count]]
            for slots, count in zip(self.all_slots, counts, strict=True)
        ]

    def share(self, weights: Lanes, owned: Sequence[Bounds]) -> None:
        self._meet()

    def abort(self) -> None:
        self._aborted = True

    def close(self) -> None:
        self.all_slots.clear()

    def _meet(self) -> None:
        self.words.arrive()
        self.words.wait()
