# SPDX-License-Identifier: Apache-2.0
"""Push a gradient to a server and pull the weights back, again and again; print seconds a turn.

    python transfer.py CONTESTANT BYTES TURNS

A turn begins with the gradient where backward left it, and ends with the new weights in memory of
the worker's own. What each contestant is, is told in parameter_server.py.
"""

import ctypes
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from manyhands.accounting.deal_micro_batches import Cut, MicroBatch, Node
from manyhands.training import build_training
from manyhands.training.loop import train
from manyhands.training.memory.memory import Memory
from manyhands.training.state.layout import Unit, share_out, units
from manyhands.training.state.replica import Replica
from manyhands.training.sync.allreduce.local_sum import LocalSum
from manyhands.training.sync.canonical_sum import TreeSum
from manyhands.training.sync.leaf_gradients import Leaf
from manyhands.training.sync.merge.history import Recorder
from manyhands.training.sync.merge.merge_server import MergeServer
from manyhands.training.sync.merge.seat import MergeParts
from manyhands.training.sync.sync import Place
from manyhands.values.config import TrainConfig
from manyhands.values.world import World

WARM = 5
"""Turns that are not counted: pages are touched for the first time in them."""


def timed(turn: Callable[[], None], turns: int) -> float:
    for _ in range(WARM):
        turn()
    began = time.perf_counter()
    for _ in range(turns):
        turn()
    return (time.perf_counter() - began) / turns


def forked(child: Callable[[], None]) -> int:
    """Another process, which does not outlive this one."""
    if (pid := os.fork()) == 0:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        code = 1
        try:
            child()
            code = 0
        finally:
            sys.stdout.flush()
            os._exit(code)
    return pid


def ended(pid: int) -> None:
    _, status = os.waitpid(pid, 0)
    if status != 0:
        raise RuntimeError(f"the other process ended with {status}")


def shared_memory(size: int) -> Memory:
    fd = os.memfd_create("transfer")
    os.ftruncate(fd, size)
    return Memory(fd)


# ---- the limits


def copy_pair(nbytes: int, turns: int) -> float:
    memory = shared_memory(4 * nbytes + (1 << 20))
    gradient, table = (memory.tensor(nbytes // 4, dtype=torch.float32) for _ in range(2))
    own = torch.zeros(nbytes // 4)
    gradient.fill_(1e-3)

    def turn() -> None:
        table.copy_(gradient)
        own.copy_(table)

    return timed(turn, turns)


def over_sockets(pair: tuple[socket.socket, socket.socket], nbytes: int, turns: int) -> float:
    here, there = pair

    def receive(line: socket.socket, into: memoryview) -> None:
        at = 0
        while at < len(into):
            count = line.recv_into(into[at:])
            if count == 0:
                raise RuntimeError("the other side has hung up")
            at += count

    def serve() -> None:
        here.close()
        table = memoryview(bytearray(nbytes))
        for _ in range(WARM + turns):
            receive(there, table)
            there.sendall(table)

    pid = forked(serve)
    there.close()
    gradient, own = memoryview(bytearray(b"\x01" * nbytes)), memoryview(bytearray(nbytes))

    def turn() -> None:
        here.sendall(gradient)
        receive(here, own)

    found = timed(turn, turns)
    ended(pid)
    return found


def unix(nbytes: int, turns: int) -> float:
    return over_sockets(socket.socketpair(socket.AF_UNIX), nbytes, turns)


def tcp(nbytes: int, turns: int) -> float:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = socket.create_connection(listener.getsockname())
        there, _ = listener.accept()
    for line in (here, there):
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return over_sockets((here, there), nbytes, turns)


# ---- ours


class Patient:
    def broken(self) -> bool:
        return False

    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...


class OneStep:
    """A feed of steps of one micro-batch with nothing in it."""

    def cut(self, step: int) -> Cut:
        return Cut(step, 0, step, (1,), step)

    def micro_batches(self, step: Cut, indices: Iterable[int]) -> Iterator[MicroBatch]:
        for index in indices:
            yield MicroBatch(step.step, index, 1, 1.0, step.start, None)


class NoLoss:
    """A gradient that costs nothing."""

    most_bytes = 0

    def __init__(self, replica: Replica) -> None:
        self.buffers, (self.weights,) = replica.buffers, replica.parameters.values()
        self.gradient = torch.full_like(self.weights, 1e-3)

    def begin(self, cut: Cut, micro_batches: Any, loss: Any, gather: Any) -> Any:
        return micro_batches

    def compute(self, cut: Cut, micro_batch: MicroBatch, loss: Any, during: Any = None) -> Leaf:
        self.buffers.begin(alone=False)
        self.weights.grad = self.gradient
        return Leaf(1.0, None, {})

    def compute_alone(self, cut: Cut, index: int, fetch: Any, loss: Any) -> Leaf:
        raise AssertionError("nobody is audited")

    def forget(self) -> None: ...


class NoRule:
    """A server that only puts down what was pushed."""

    def __init__(self, parts: MergeParts, owned: list[Unit]) -> None:
        self.parts, self.owned, self.whole = parts, owned, parts.updating.whole

    def update(self, tally: Any, pushed: Any, origin: Any, factor: float) -> None:
        weights, ((_, gradient),) = self.parts.replica.weights, pushed
        for unit in self.owned:
            self.parts.begins(unit, tally.step)
            for dtype, (a, b) in unit.bounds.items():
                weights[dtype][a:b].copy_(gradient[dtype][a:b])
            self.parts.applied(unit, tally.step)


def leave_gradients_where_they_are() -> None:
    """In a worker: backward has left them in the mailbox, and they are finite."""
    filled: set[int] = set()

    def collect(self: LocalSum, tree: TreeSum[int], index: int) -> None:
        if id(self) not in filled:
            filled.add(id(self))
            for lane in self.slots[0].values():
                lane.fill_(1e-3)
        for parameter in self.parameters:
            parameter.grad = None
        tree.push(Node(index, 0), 0)

    LocalSum.collect = collect  # type: ignore[method-assign]
    LocalSum.reach = lambda self, tree: 0.0  # type: ignore[method-assign]


class OneParameter(nn.Module):
    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(nbytes // 4))


def member(memory: Memory, rank: int, nbytes: int, turns: int, *, rule: bool) -> list[float]:
    """Rank 0 serves, rank 1 works; when each push had been applied."""
    model, feed, steps = OneParameter(nbytes), OneStep(), WARM + turns
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    settings = TrainConfig(batch=1, micro_batch=1, steps=steps)
    replica = Replica(model, optimizer, None, memory, torch.device("cpu"))
    collective = build_training.collective(
        "shared",
        settings,
        memory,
        device=torch.device("cpu"),
        reach=cast(Any, None),
        patience=Patient(),
    )
    sync = MergeServer(
        replica,
        memory,
        collective,
        settings,
        NoLoss(replica),
        feed,
        bound=None,
        heard=lambda: 0,
        moment=lambda name: None,
        met=lambda generation, step, tally: None,
        record=Recorder(),
    )
    if not rule:
        (spans,) = share_out(replica.layout, 1, cut="blocks")
        bare = NoRule(sync.parts, units(replica.layout, spans, cut="blocks"))
        sync.parts = replace(sync.parts, updating=cast(Any, bare))
    place = Place(World(rank, 2), 1, (0.0, 1.0), fresh=0, due=lambda done: steps)
    sync.regroup(place)
    times: list[float] = []

    def note(replica: Replica, facts: Any) -> None:
        times.append(time.perf_counter())

    loss: Callable[[nn.Module, Any], Tensor] = lambda model, batch: torch.zeros(())  # noqa: E731
    train(replica, feed, sync, loss, steps=steps, hooks=[note])
    sync.close()
    return times


def ours(*, rule: bool, collects: bool = False) -> Callable[[int, int], float]:
    def contestant(nbytes: int, turns: int) -> float:
        memory = shared_memory(1 << 44)

        def work() -> None:
            if not collects:
                leave_gradients_where_they_are()
            member(Memory(memory.fd), 1, nbytes, turns, rule=rule)

        pid = forked(work)
        times = member(Memory(memory.fd), 0, nbytes, turns, rule=rule)
        ended(pid)
        return (times[-1] - times[WARM - 1]) / turns

    return contestant


CONTESTANTS = {
    "copy-pair": copy_pair,
    "unix": unix,
    "tcp": tcp,
    "no-rule": ours(rule=False),
    "adamw": ours(rule=True),
    "adamw-trained": ours(rule=True, collects=True),
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    name, nbytes, turns = sys.argv[1:]
    print(CONTESTANTS[name](int(nbytes), int(turns)))
