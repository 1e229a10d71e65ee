# SPDX-License-Identifier: Apache-2.0
"""An optimizer whose state outlives its worker: cut as it can be, under an undo log."""

from typing import NamedTuple

from manyhands.training.memory.memory import Memory
from manyhands.training.state.optimizer_kinds import NOTHING_KEPT, how_to_cut, what_it_keeps
from manyhands.training.state.replica import Replica
from manyhands.training.state.sharded_optimizer import ShardedOptimizer
from manyhands.training.state.undo_log import UndoLog


class KeptOptimizer(NamedTuple):
    cut: str
    undo_log: UndoLog
    optimizer: ShardedOptimizer


def keep_optimizer(replica: Replica, memory: Memory, *, seed: int) -> KeptOptimizer:
    layout = replica.layout
    cut, _ = how_to_cut(replica.optimizer)
    kept = what_it_keeps(replica.optimizer, layout) if cut == "blocks" else NOTHING_KEPT
    undo_log = UndoLog(
        layout,
        replica.weights,
        kept.slots,
        kept.scalars,
        replica.buffers.layout.sizes,
        memory,
        extras=cut != "blocks",
        frozen=cut == "nowhere",
    )
    optimizer = ShardedOptimizer(
        replica.optimizer,
        replica.parameters,
        layout,
        replica.weights,
        undo_log,
        cut,
        kept,
        replica.buffers,
        seed=seed,
    )
    return KeptOptimizer(cut, undo_log, optimizer)
