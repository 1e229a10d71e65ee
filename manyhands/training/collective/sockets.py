# SPDX-License-Identifier: Apache-2.0
"""Hosts of a view over TCP sockets of our own: a cut link or a hung peer blocks nobody for long.

As many bytes move as in a ring allreduce, straight between tensors and sockets, with all hosts at
once in one thread. Hosts have proven who they are when they met (`PeerListener`). From then on
bytes travel sealed (`encrypt`), or plain: then they can be read on the way. Every frame says of
which view, kind, turn and length it is, so hosts that disagree about what they are doing find out
at once.

When the kernel gives up a connection or a host leaves, whoever waits is told at once, takes leave
of the others in turn, and the view is over for all.
"""

import select
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from manyhands.training.collective.collective import (
    FACTS,
    Bytes,
    Meanwhile,
    Patience,
    nothing,
    stretch,
)
from manyhands.training.collective.frames import (
    EXCHANGE,
    GATHER,
    LOST,
    MEASURE,
    SHARE,
    Connection,
    SendBuffers,
    close_all,
)
from manyhands.training.collective.handshake import NAP_S, PeerListener, named
from manyhands.training.state.layout import Bounds, Lanes
from manyhands.values.errors import Broken
from manyhands.values.world import World, opponents

SPIN_S = 50e-6
PINGS = 8
TRIES = 3
"""Of each size of a block, the best counts: somebody else may have had the processor."""
LEAST_BYTES, MOST_BYTES, GROWTH = 1 << 14, 1 << 22, 4
MEASURE_S = 0.02
"""How long the largest of the blocks may take by which the bandwidth is measured."""

Arrays = Sequence[NDArray[Any]]

_GONE = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR
_EVENTS = select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET


class Sockets:
    """`slots` are given: they are the host's, in memory that its workers share.

    One thread at a time may use it; `close` may be called by any.
    """

    def __init__(
        self,
        world: World,
        slots: Sequence[Lanes],
        *,
        listener: PeerListener,
        addresses: Sequence[str],
        generation: int,
        secret: bytes,
        patience: Patience,
        dead_s: float = 1.5,
        encrypt: bool = False,
    ) -> None:
        """Meets the others. The kernel takes a host for lost that does not answer for `dead_s`, or
        that stops reading for so long in the middle of a frame."""
        self.world, self.slots, self.patience = world, slots, patience
        links = listener.meet(
            world,
            addresses,
            generation=generation,
            secret=secret,
            patience=patience,
            dead_s=dead_s,
            encrypt=encrypt,
        )
        self._lines = {rank: Connection(rank, link, generation) for rank, link in links.items()}
        # Edge-triggered, for everything is tried before it is waited for.
        self._epoll = select.epoll()
        for link in links.values():
            self._epoll.register(link.socket, _EVENTS)
        self._in_use = threading.Lock()
        self._over: Broken | None = None
        self._rows: dict[tuple[int, int], Bytes] = {}
        self._turns: dict[int, int] = {}
        self._received: dict[tuple[int, int, torch.dtype], Tensor] = {}
        listener.leave_last = self.close

    def gather(
        self, mine: Bytes, kind: int = FACTS, stamp: int = 0, meanwhile: Meanwhile = nothing
    ) -> list[Bytes]:
        # Two tables in turn, as what was gathered last is still to be read.
        me, size = self.world.rank, len(mine)
        turn = self._turns[kind] = 1 - self._turns.get(kind, 0)
        shape = self.world.num_ranks, -(-size // 64) * 64
        rows = self._rows.get((kind, turn))
        if rows is None or rows.shape != shape:
            rows = self._rows[kind, turn] = np.empty(shape, dtype=np.uint8)
        messages = [row[:size] for row in rows]
        messages[me][:] = mine
        for rank, line in self._lines.items():
            line.begin(GATHER, [messages[me].data], [messages[rank].data])
        self._move(meanwhile)
        return messages

    def exchange(self, counts: Sequence[int], owned: Sequence[Bounds]) -> list[list[Lanes]]:
        """What others have sent is valid until the next exchange."""
        me, mine = self.world.rank, owned[self.world.rank]
        parts: list[list[Lanes]] = []
        for rank, count in enumerate(counts):
            if rank == me:
                parts.append([stretch(slot, mine) for slot in self.slots[:count]])
                continue
            sent = [stretch(slot, owned[rank]) for slot in self.slots[: counts[me]]]
            parts.append(
                [
                    {d: self._room(rank, k, d, b - a) for d, (a, b) in mine.items()}
                    for k in range(count)
                ]
            )
            self._lines[rank].begin(EXCHANGE, _buffers(sent), _buffers(parts[rank]))
        self._move()
        return parts

    def share(self, lanes: Lanes, owned: Sequence[Bounds]) -> None:
        mine = _buffers([stretch(lanes, owned[self.world.rank])])
        for rank, line in self._lines.items():
            line.begin(SHARE, mine, _buffers([stretch(lanes, owned[rank])]))
        self._move()

    def measure(self) -> list[tuple[int, float, float]]:
        """Of each other host: rank, seconds there and back, bytes per second in both directions
        at once. Called by all; both of a pair get the same numbers. Takes about 50 ms a pair."""
        found: list[tuple[int, float, float]] = []
        for rank in opponents(self.world):
            if rank is None:  # its turn to rest
                continue
            line = self._lines[rank]
            seconds, speed = self._lead(line) if self.world.rank < rank else self._follow(line)
            found.append((rank, seconds, speed))
        return sorted(found)

    def called(self, nap_s: float) -> bool:
        """Whether another host has begun something, or ended: waits for it for so long at most.
        Between two calls of the others, by the same thread."""
        try:
            with self._in_use:
                if self._over:
                    raise self._over
                if self.patience.broken():
                    raise Broken("waiting for other hosts was broken off")
                poll = select.poll()
                for line in self._lines.values():
                    poll.register(line.socket, select.POLLIN)
                return bool(poll.poll(1000 * nap_s))
        finally:
            if self._over:
                self._leave()

    def recall(self, kind: int, stamp: int) -> list[Bytes]:
        return []

    def left_by(self, rank: int) -> Sequence[Lanes]:
        raise NotImplementedError("what another host wrote is not here")

    def close(self) -> None:
        """Quick, whatever the others do. A call that another thread is in gets Broken."""
        self._over = self._over or Broken("this host has left the view")
        self._leave()

    def _leave(self) -> None:
        """Done by whoever finds it unused: a socket must not be closed under a call."""
        if self._in_use.acquire(blocking=False):
            if not self._epoll.closed:
                close_all(list(self._lines.values()))
                self._epoll.close()
            self._in_use.release()

    def _room(self, rank: int, k: int, dtype: torch.dtype, size: int) -> Tensor:
        room = self._received.get((rank, k, dtype))
        if room is None or len(room) < size:
            room = self._received[rank, k, dtype] = torch.empty(size, dtype=dtype)
        return room[:size]

    # ---- measuring

    def _lead(self, line: Connection) -> tuple[float, float]:
        """The leader of a pair has the clock. It tells the other how much comes next."""
        orders, answer = np.zeros(3), np.zeros(3)
        trips = [self._time(line, [orders], [answer]) for _ in range(PINGS)]
        seconds, speed, size = min(trips), 0.0, LEAST_BYTES
        block, room = np.ones((2, MOST_BYTES), dtype=np.uint8)
        while size:
            orders[:] = size, seconds, speed
            blocks = [block[:size]], [room[:size]]
            took = min(
                self._time(line, [orders], None) + self._time(line, *blocks) for _ in range(TRIES)
            )
            speed = size / max(took - seconds, took / 10)
            size = GROWTH * size if took < MEASURE_S / GROWTH and size < MOST_BYTES else 0
        orders[:] = 0, seconds, speed
        self._time(line, [orders], None)
        return seconds, speed

    def _follow(self, line: Connection) -> tuple[float, float]:
        orders, block = np.zeros(3), np.ones((2, MOST_BYTES), dtype=np.uint8)
        for _ in range(PINGS):
            self._time(line, None, [orders])
            self._time(line, [orders], None)
        while True:
            self._time(line, None, [orders])
            size, seconds, speed = (float(x) for x in orders)
            if not size:
                return seconds, speed
            self._time(line, [block[0, : int(size)]], [block[1, : int(size)]])

    def _time(self, line: Connection, send: Arrays | None, receive: Arrays | None) -> float:
        begun = time.perf_counter()
        line.begin(MEASURE, _bytes_of(send), _bytes_of(receive))
        self._move()
        return time.perf_counter() - begun

    # ---- moving

    def _move(self, meanwhile: Meanwhile = nothing) -> None:
        """All that was begun, to its end."""
        try:
            with self._in_use:
                if self._over:
                    raise self._over
                self._run(meanwhile)
        except BaseException as error:
            stopped = Broken("this host stopped in the middle of an exchange")
            self._over = self._over or (error if isinstance(error, Broken) else stopped)
            raise
        finally:
            if self._over:
                self._leave()

    def _run(self, meanwhile: Meanwhile) -> None:
        self._attempt(self._lines.values())
        meanwhile()
        busy = [line for line in self._lines.values() if line.busy]
        until = time.perf_counter() + SPIN_S
        while busy and time.perf_counter() < until:
            self._attempt(busy)
            busy = [line for line in busy if line.busy]
        if busy:
            with self.patience:
                self._wait(busy)

    def _wait(self, busy: list[Connection]) -> None:
        ask_at = 0.0
        while busy:
            now = time.perf_counter()
            if now >= ask_at:
                ask_at = now + NAP_S
                if self._over:
                    raise self._over
                if self.patience.broken():
                    raise Broken(f"waiting for {_named(busy)} was broken off")
            if self._attempt(busy):
                busy = [line for line in busy if line.busy]
            else:
                self._sleep(ask_at - now, busy)

    def _attempt(self, lines: Iterable[Connection]) -> bool:
        """Whether anything could be moved."""
        moved = False
        for line in lines:
            try:
                moved |= line.push() | line.pull()
            except OSError as error:
                raise self._loss(line, error) from error
        return moved

    def _sleep(self, nap_s: float, busy: list[Connection]) -> None:
        """Until something can be moved. Who has done its part can be lost all the same."""
        events = self._epoll.poll(nap_s)
        if not events or any(event & _GONE for _, event in events):
            for line in self._lines.values():
                if line not in busy and line.is_gone():
                    raise self._loss(line, ConnectionResetError("it ended"))

    def _loss(self, line: Connection, error: OSError) -> Broken:
        """Others leave when one is lost, and their farewell may be here first: all are looked at,
        and looked at again."""
        for nap_s in (NAP_S, 0):
            if lost := [line for line in self._lines.values() if line.fate() == LOST]:
                why = f"the connection to {_named(lost)} broke: {error}"
                return Broken(why, lost=tuple(line.rank for line in lost))
            time.sleep(nap_s)
        return Broken(f"{_named([line])} left the view: {error}")


def _named(lines: Sequence[Connection]) -> str:
    return named([line.rank for line in lines])


def _bytes_of(arrays: Arrays | None) -> SendBuffers | None:
    return None if arrays is None else [array.view(np.uint8).data for array in arrays]


def _buffers(slots: Iterable[Lanes]) -> SendBuffers:
    """The memory itself, in an order that all hosts agree on."""
    return [
        lanes[dtype].detach().view(torch.uint8).numpy().data
        for lanes in slots
        for dtype in sorted(lanes, key=str)
        if lanes[dtype].numel()
    ]
