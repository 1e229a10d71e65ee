"""Deaths at chosen stores: what SIGKILL leaves behind in memory that outlives a worker."""

import sys
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from manyhands.training.state import sharded_optimizer
from manyhands.training.state.bare_step import bare_step
from manyhands.training.state.layout import Unit
from manyhands.training.state.sharded_optimizer import ShardedOptimizer
from manyhands.training.state.undo_log import UndoLog


class Died(BaseException):
    """Stands for SIGKILL: nothing of ours catches it."""


Do = Callable[[], object]
Store = Callable[[Do, Do], None]
"""Does the first; or, when it is time to die, the second and no more."""


class Frail(np.ndarray[Any, Any]):
    """Numbers in shared memory, while their writer is about to die."""

    store: Store

    def __array_finalize__(self, whole: Any) -> None:
        if hasattr(whole, "store"):
            self.store = whole.store

    def __setitem__(self, where: Any, value: Any) -> None:
        target = self.view(np.ndarray)

        def half() -> None:
            if isinstance(where, slice):
                n = len(target[where]) // 2
                target[where][:n] = np.broadcast_to(value, target[where].shape)[:n]

        self.store(lambda: target.__setitem__(where, value), half)


@dataclass(frozen=True)
class Death:
    """At the n-th store to what is kept; None: in the optimizer's own code, which leaves garbage.
    A store that does not come to pass kills nobody."""

    nth: int | None
    halfway: bool = True
    """In the middle of that store, or just before it."""

    @contextmanager
    def strikes(
        self,
        undo_log: UndoLog,
        noise: Any = None,
        *,
        among: Callable[[], bool] = lambda: True,
        told: "list[Store] | None" = None,
        beside: Sequence[tuple[object, str]] = (),
    ) -> Generator[list[Died]]:
        """Within this, somebody dies. What it leaves behind is what it had stored until then.

        `among` says whether the calling thread is one of those that die. `told` is given the way to
        make other things than stores deadly. `beside`: other words that outlive a worker, by the
        names under which their owners keep them.
        """
        deaths: list[Died] = []
        stores = 0
        lerp, copy = torch.Tensor.lerp_, torch.Tensor.copy_
        update, working = ShardedOptimizer.update, threading.local()

        def store(all: Do, half: Do) -> None:
            nonlocal stores
            if not among():
                all()
                return
            stores += 1
            if self.nth is None or stores <= self.nth:
                all()
                return
            if self.halfway and stores == self.nth + 1:
                half()
            raise Died

        def dying_copy(target: Tensor, source: Tensor) -> Tensor:
            n = target.numel() // 2
            half = target[:n] if target.dim() == 1 else target
            store(lambda: copy(target, source), lambda: n and copy(half, source[: len(half)]))
            return target

        def dying_lerp(target: Tensor, end: Tensor, part: float) -> Tensor:
            n = target.numel() // 2
            store(lambda: lerp(target, end, part), lambda: lerp(target[:n], end[:n], part))
            return target

        def dying_copies(targets: list[Tensor], sources: list[Tensor]) -> None:
            for target, source in zip(targets, sources, strict=True):
                dying_copy(target, source)

        def noted_update(self: ShardedOptimizer, work: Any, *rest: Any, **named: Any) -> bool:
            working.on = self, work.unit
            return update(self, work, *rest, **named)

        def dying_step(optimizer: torch.optim.Optimizer) -> None:
            bare_step(optimizer)
            sharded, unit = working.on
            scribble(sharded.undo_log, sharded.weights, unit, noise)
            raise Died

        with pytest.MonkeyPatch.context() as patch:
            if told is not None:
                told.append(store)
            words = [(undo_log, name) for name in ("done", "_heads", "summed")]
            for owner, name in (*words, *beside):
                frail = getattr(owner, name).view(Frail)
                frail.store = store
                patch.setattr(owner, name, frail)
            patch.setattr(torch.Tensor, "copy_", dying_copy)
            patch.setattr(torch.Tensor, "lerp_", dying_lerp)
            keep_module = sys.modules["manyhands.training.state.undo_log"]
            patch.setattr(keep_module, "_FOREACH_COPY", dying_copies)
            if self.nth is None:
                patch.setattr(ShardedOptimizer, "update", noted_update)
                patch.setattr(sharded_optimizer, "bare_step", dying_step)
            try:
                yield deaths
            except Died as died:
                deaths.append(died)


def scribble(undo_log: UndoLog, weights: dict[Any, Tensor], unit: Unit, noise: Any) -> None:
    """Anything, wherever an update of this unit may write."""
    lanes = [(dtype, weights[dtype]) for dtype in unit.bounds]
    lanes += [(dtype, lane) for (_, dtype), lane in undo_log.slots.items() if dtype in unit.bounds]
    for dtype, lane in lanes:
        a, b = unit.bounds[dtype]
        lane[a:b] = torch.from_numpy(noise.normal(size=b - a)).to(lane.dtype)
    first, stop = unit.blocks
    for lane in undo_log.scalars.values():
        lane[first:stop] = torch.from_numpy(noise.normal(size=stop - first)).to(lane.dtype)
    undo_log.exists[first:stop] = torch.from_numpy(noise.integers(0, 2, stop - first))


NEVER = Death(1 << 30)
