# SPDX-License-Identifier: Apache-2.0
"""A task's `after_step(model)`: what it changes belongs to the step, once per step and host.

It runs on the first worker of a host, when all its workers have updated their parts and before
anybody goes on. It may write to any weight and buffer, so what it may write to is copied aside
before, and two words say how far it has come: of which step it is wanted (`planned`), and of which
step it writes, or is done (`mark`).

    plan(step)        planned = step + 1, before any block takes the step; a skipped step has none
    copy_aside(unit)  each worker, with each unit that it has updated
    (all meet)
    prepare(step)     copy buffers aside
    run(step)         mark = writing, call it, keep its buffers, mark = done
    (all meet)

Weights that are not trained are copied aside when something first writes to them: they may be
many, and most are never written to.

Invariant: while the mark says "writing", all that has been written to is aside as it was before;
otherwise weights and buffers are those before the call, or (done) after it. So whoever mends looks
at the two words (`decide`): undoes what was half done, and calls it if it is wanted and not done.
Undoing is idempotent, and so is all of it: a mender can die too.

In private memory nothing survives its worker, so nothing is copied aside.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module
from torch.utils._python_dispatch import TorchDispatchMode

from manyhands.training.compute.seeds import seed_everything
from manyhands.training.memory.memory import Memory
from manyhands.training.state.followers import F32, Follower, can_follow, copying
from manyhands.training.state.layout import Lanes, TensorPlace, Unit
from manyhands.training.state.lent_weights import Lendable, lendable, writable
from manyhands.training.state.replica import Replica
from manyhands.values.forked_children import one_process

_WRITING, _DONE = 1, 0


class Mending(Enum):
    """What is to be done about a call that may have been broken off."""

    NOTHING = "it is not wanted, or done"
    CALL = "nothing of it was begun"
    UNDO = "it was begun: undo it, then call it"


@dataclass(frozen=True, slots=True)
class CallWords:
    """The two words."""

    planned: int
    """After so many steps it is wanted."""
    step: int
    """After so many steps it was called last;"""
    writing: bool
    """and that call has not ended."""


def decide(found: CallWords, step: int) -> Mending:
    """All weights are those after `step` steps of the optimizer. Pure."""
    if found.writing:
        assert found.step == found.planned == step, f"{found}: nobody goes on before it is done"
        return Mending.UNDO
    return Mending.CALL if found.planned == step != found.step else Mending.NOTHING


class AfterStep:
    def __init__(
        self,
        act: Callable[[Module], Any],
        replica: Replica,
        memory: Memory,
        *,
        seed: int,
        put_buffers: Callable[[int, Lanes], None],
        moment: Callable[[str], None],
    ) -> None:
        """`put_buffers(step, lanes)`: keep buffers as those after so many steps."""
        self.act, self.replica, self.seed = act, replica, seed
        self.put_buffers, self.moment, self.journals = put_buffers, moment, memory.shared
        self.trainable = replica.layout.trainable_sizes
        self._lendable = lendable(replica.layout.pieces, replica.parameters, replica.weights)
        self.frozen = [piece for piece in replica.layout.pieces if not piece.trainable]
        self._aside: Lanes = {
            dtype: _beside(lane, memory) for dtype, lane in sorted(replica.weights.items(), key=str)
        }
        self._buffers: Lanes = {
            dtype: _beside(lane, memory)
            for dtype, lane in sorted(replica.buffers.committed.items(), key=str)
        }
        self._copied = cast(Any, memory.array(max(1, len(self.frozen)), dtype=np.uint8))
        """Which of the weights that are not trained are aside."""
        self._words = cast(Any, memory.array(2, dtype=np.int64))

    @property
    def progress(self) -> CallWords:
        planned, mark = (int(word) for word in self._words)
        return CallWords(planned, mark >> 1, mark & 1 == _WRITING)

    def _mark(self, step: int, state: int) -> None:
        self._words[1] = step << 1 | state

    def reset(self, step: int) -> None:
        """Begin with weights after `step` steps, and what follows each of them."""
        self._words[0] = 0
        self._mark(step, _DONE)

    # ---- a step

    def plan(self, step: int) -> None:
        """It is wanted after step `step`."""
        self._words[0] = step + 1

    def copy_aside(self, unit: Unit) -> None:
        """This unit has taken the step."""
        if self.journals:
            for dtype, (a, b) in unit.bounds.items():
                self._aside[dtype][a:b].copy_(self.replica.weights[dtype][a:b])

    def follower(self, unit: Unit) -> list[Follower]:
        """What copies this unit aside within the native pass of the optimizer; none: not so."""
        if not self.journals or not can_follow(unit):
            return []
        return [copying(self.replica.weights[F32], self._aside[F32])]

    def prepare(self, step: int) -> None:
        """What of it needs no weights: others may still be updating theirs."""
        if self.journals:
            self._copied[:] = 0
            for dtype, lane in self.replica.buffers.committed.items():
                self._buffers[dtype].copy_(lane)
        make_ready(self.replica, self.seed, step)

    def run(self, step: int) -> None:
        """Call it: all units have taken step `step`, and are aside."""
        self._mark(step + 1, _WRITING)
        watched = self.frozen if self.journals else []
        call_after_step(self.act, self.replica, self._lendable, self._keep, watched)
        self.put_buffers(step + 1, self.replica.buffers.committed)
        self.moment("afterwards")
        self._mark(step + 1, _DONE)

    def _keep(self, piece: TensorPlace) -> None:
        """Before the first write to a weight that is not trained."""
        k = self.frozen.index(piece)
        if not self._copied[k]:
            lane = self._aside[piece.dtype]
            lane[piece.start : piece.stop].copy_(
                self.replica.weights[piece.dtype][piece.start : piece.stop]
            )
            self._copied[k] = 1

    # ---- after a death

    def undo(self, step: int) -> None:
        """Weights and buffers after `step` steps are as they were before it was called."""
        if decide(self.progress, step) is not Mending.UNDO:
            return
        weights = self.replica.weights
        for dtype, size in self.trainable.items():
            weights[dtype][:size].copy_(self._aside[dtype][:size])
        for k, piece in enumerate(self.frozen):
            if self._copied[k]:
                stretch = slice(piece.start, piece.stop)
                weights[piece.dtype][stretch].copy_(self._aside[piece.dtype][stretch])
        self.put_buffers(step, self._buffers)
        self._mark(step - 1, _DONE)

    def catch_up(self, step: int) -> None:
        """All weights are those after `step` steps of the optimizer, and committed buffers too."""
        if decide(self.progress, step) is Mending.CALL:
            for dtype, size in self.trainable.items():
                self._aside[dtype][:size].copy_(self.replica.weights[dtype][:size])
            self.prepare(step - 1)
            self.run(step - 1)


def make_ready(replica: Replica, seed: int, step: int) -> None:
    """For the call after step `step`: buffers as they are then, and what is drawn at random."""
    replica.buffers.show()
    seed_everything(seed, step, "after_step")


def call_after_step(
    act: Callable[[Module], Any],
    replica: Replica,
    weights: Sequence[Lendable],
    keep: Callable[[TensorPlace], None] = lambda piece: None,
    watched: Sequence[TensorPlace] = (),
) -> None:
    """The user's function, on the model with these weights; its buffers are then committed. `keep`
    is told of those of `watched` that are about to be written to."""
    with replica.guard.lent("after_step"):
        lending = writable(weights, whose="after_step", keep=keep)
        with torch.no_grad(), lending, _telling(replica.weights, watched, keep), one_process():
            act(replica.model)
    replica.buffers.commit_alone()


@contextmanager
def _telling(
    weights: Lanes, watched: Sequence[TensorPlace], keep: Callable[[TensorPlace], None]
) -> Generator[None]:
    if not watched:
        yield
        return
    with _BeforeWrites(weights, watched, keep):
        yield


class _BeforeWrites(TorchDispatchMode):
    """Sees every operation of torch before it is done: `weight.data.mul_` moves no counter."""

    def __init__(
        self,
        weights: Lanes,
        watched: Sequence[TensorPlace],
        keep: Callable[[TensorPlace], None],
    ) -> None:
        super().__init__()
        self.keep = keep
        self.stretches: list[tuple[int, int, TensorPlace]] = []
        for piece in watched:
            size, first = piece.dtype.itemsize, weights[piece.dtype].data_ptr()
            self.stretches.append((first + piece.start * size, first + piece.stop * size, piece))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # it would import the compiler, to tell it to look away: seconds

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = dict(kwargs or {})
        for k, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[k] if k < len(args) else given.get(argument.name)
            for tensor in value if isinstance(value, list | tuple) else (value,):  # pyright: ignore[reportUnknownVariableType]
                if isinstance(tensor, Tensor):
                    self._about_to_write(tensor.data_ptr())
        return func(*args, **given)

    def _about_to_write(self, address: int) -> None:
        for first, stop, piece in self.stretches:
            if first <= address < stop:
                self.keep(piece)


def _beside(lane: Tensor, memory: Memory) -> Tensor:
    """Room for a copy of it that outlives this worker."""
    if lane.device.type != "cpu":
        return torch.zeros_like(lane)
    return memory.tensor(lane.numel(), dtype=lane.dtype)
