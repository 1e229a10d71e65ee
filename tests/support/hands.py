"""Workers without processes: each has its own model and optimizer, over memory that all share."""

import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.training.compute.one_thread import one_thread
from manyhands.training.memory.memory import Memory
from manyhands.training.state.layout import Unit, share_out, units
from manyhands.training.state.optimizer_kinds import NOTHING_KEPT, how_to_cut, what_it_keeps
from manyhands.training.state.replica import Replica
from manyhands.training.state.sharded_optimizer import OptimizerEntry, ShardedOptimizer
from manyhands.training.state.undo_log import UndoLog

Make = Callable[[nn.Module], Optimizer]
Gradients = Sequence[Tensor | None]
"""In the order of the trainable parameters."""


@contextmanager
def segment() -> Generator[int]:
    """Memory that outlives its workers, as the host agent holds it."""
    fd = os.memfd_create("test")
    os.ftruncate(fd, 1 << 40)
    yield fd
    os.close(fd)


class Hand:
    """What `AllReduce` has of the optimizer's side. Without a segment its memory is its own."""

    def __init__(self, model: nn.Module, make: Make, fd: int | None) -> None:
        memory = Memory(fd)
        self.users = make(model)
        self.replica = Replica(model, self.users, None, memory, torch.device("cpu"))
        self.layout, self.weights = self.replica.layout, self.replica.weights
        self.cut, _ = how_to_cut(self.users)
        kept = what_it_keeps(self.users, self.layout) if self.cut == "blocks" else NOTHING_KEPT
        self.undo_log = UndoLog(
            self.layout,
            self.weights,
            kept.slots,
            kept.scalars,
            self.replica.buffers.layout.sizes,
            memory,
            extras=self.cut != "blocks",
            frozen=self.cut == "nowhere",
        )
        self.optimizer = ShardedOptimizer(
            self.users,
            self.replica.parameters,
            self.layout,
            self.weights,
            self.undo_log,
            self.cut,
            kept,
            self.replica.buffers,
        )

    def begin(self, step: int = 0) -> None:
        """As the leader does: this model is what all start from."""
        self.replica.publish()
        self.undo_log.reset(step)

    def units_of(self, rank: int, ranks: int) -> list[Unit]:
        return units(self.layout, share_out(self.layout, ranks, cut=self.cut)[rank], cut=self.cut)

    def join(self, rank: int, ranks: int, step: int, *, fresh: bool = False) -> None:
        """Take a place among `ranks` workers, with the weights and the state that are kept."""
        self.replica.adopt()
        self.optimizer.regroup(rank, self.units_of(rank, ranks), step, fresh=fresh)

    def update(self, k: int, gradients: Gradients, step: int) -> None:
        """Take a step for the k-th of its units."""
        lanes = {d: torch.zeros(n, dtype=d) for d, n in self.layout.trainable_sizes.items()}
        for piece, gradient in zip(self.layout.trainable, gradients, strict=True):
            if gradient is not None:
                piece.view(lanes[piece.dtype])[...] = gradient
        touched = [g is not None for g in gradients]
        work = self.optimizer.works[k]
        unit = work.unit.bounds
        stretch = {d: lanes[d][a:b] for d, (a, b) in unit.items()}
        with torch.no_grad(), one_thread():
            self.optimizer.update(work, stretch, unit, touched, step)

    def step(self, gradients: Gradients, step: int) -> None:
        self.optimizer.prepare(step)
        for k in range(len(self.optimizer.works)):
            self.update(k, gradients, step)


def crew(count: int, model: Callable[[], nn.Module], make: Make, fd: int | None) -> list[Hand]:
    return [Hand(model(), make, fd) for _ in range(count)]


State = dict[tuple[str, str], bytes]
"""Of an optimizer, by key and parameter: the bytes of what it keeps."""


def state_of(hands: Sequence[Hand]) -> State:
    """However it is shared out."""
    entries = [e for hand in hands for e in hand.optimizer.entries()]
    return _state(entries, hands[0].replica.parameters)


def plain_state(optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> State:
    """Of one that nobody has shared out."""
    entries = [
        OptimizerEntry(key, name, 0, value)
        for name, parameter in parameters.items()
        for key, value in optimizer.state.get(parameter, {}).items()
        if value is not None
    ]
    return _state(entries, parameters)


def _state(entries: Sequence[OptimizerEntry], parameters: Mapping[str, Tensor]) -> State:
    whole: State = {}
    for entry in sorted(entries, key=lambda e: (e.key, e.name, e.offset)):
        place, value = (entry.key, entry.name), torch.as_tensor(entry.value)
        raw = _raw(value, parameters[entry.name])
        if value.dim() > 0:
            whole[place] = whole.get(place, b"") + raw
        else:  # a counter: every part of the parameter has one, and all count alike
            assert whole.setdefault(place, raw) == raw, place
    return whole


def _raw(value: Tensor, parameter: Tensor) -> bytes:
    """In the memory order of the parameter, when it has its shape."""
    flat = value.detach().reshape(-1)
    if value.shape == parameter.shape:
        same = torch.empty_like(parameter, dtype=value.dtype).detach().copy_(value)
        flat = same.as_strided((same.numel(),), (1,))
    return flat.view(torch.uint8).numpy().tobytes()
