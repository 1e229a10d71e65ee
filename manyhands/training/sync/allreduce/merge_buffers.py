# SPDX-License-Identifier: Apache-2.0
"""What the micro-batches of a step did to the buffers: told to all workers, merged by each.

Every worker keeps its own copy of the buffers and merges all outcomes itself, by the rules of
train.buffers. BatchNorm's statistics travel with the facts of a step; what is here is the rest.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from manyhands.training.collective.collective import Bytes
from manyhands.training.state.layout import TensorPlace
from manyhands.training.state.module_buffers import ModuleBuffers, pack, packed_size, unpack
from manyhands.training.sync.allreduce.step_facts import Form, StepTally


class BufferOutcomes:
    def __init__(self, buffers: ModuleBuffers, form: Form) -> None:
        self.buffers, self.form = buffers, form
        self._mine: list[dict[str, Tensor]] = []

    def begin(self) -> None:
        """Before a worker's first micro-batch of a step."""
        self._mine = []

    def note(self, row: NDArray[np.float64]) -> None:
        """After each of them; `row` is its row of the facts."""
        self.buffers.end(self.form.of_buffers(row))
        if self.buffers.others:
            self._mine.append(self.buffers.outcome())

    def most_bytes(self, leaves: int) -> int:
        """The largest message about a step."""
        buffers = self.buffers
        return max(leaves * packed_size(buffers.others), packed_size(buffers.layout.pieces))

    def message(self, step: StepTally, rank: int) -> Bytes | None:
        """This worker's outcomes of the buffers that are merged by value; None: none changed."""
        changed = self._changed(step)
        if not changed:
            return None
        outcomes = self._mine
        if step.leaves == 1:  # all buffers after the only micro-batch, if it was computed here
            outcomes = [self.buffers.values()] if step.ranges[rank] else []
        mine, most = pack(outcomes, changed), max(len(r) for r in step.ranges)
        message = np.zeros(most * packed_size(changed), dtype=np.uint8)
        message[: len(mine)] = mine
        return message

    def _changed(self, step: StepTally) -> list[TensorPlace]:
        if step.leaves == 1:
            return list(self.buffers.layout.pieces)  # taken as they are, statistics included
        return self.buffers.changed(self.form.of_buffers(step.rows))

    def commit(self, step: StepTally, gathered: Sequence[Bytes]) -> None:
        """`gathered`: everyone's messages; none: there was nothing to tell, or nobody to tell."""
        buffers = self.buffers
        if not buffers.layout.pieces:
            return
        if step.leaves == 1 and not gathered:
            buffers.commit_alone()
            return
        if step.leaves > 1:
            buffers.commit_norms(self.form.of_buffers(step.rows))
        changed = self._changed(step)
        if not changed:
            return
        size = packed_size(changed)
        outcomes = [
            unpack(received[k * size : (k + 1) * size], changed)
            for received, r in zip(gathered, step.ranges, strict=True)
            for k in range(len(r))
        ]
        if step.leaves == 1:
            buffers.load(outcomes[0])
        else:
            buffers.commit_others(step.step, outcomes, step.columns[2])
