# SPDX-License-Identifier: Apache-2.0
"""Two levels: the workers of a host over its memory, and hosts over a network.

The first worker of each host speaks for it (`leads_host`). It has a second thread, the courier,
which does all that happens between hosts, in one order that is the same on every host; so a
collective between hosts is never entered by two threads at once.

With a single host there is no courier, and nothing here costs anything.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

import numpy as np

from manyhands.training.collective.collective import (
    FACTS,
    Bytes,
    Collective,
    Meanwhile,
    Patience,
    nothing,
)
from manyhands.training.collective.sequence_words import SequenceWords
from manyhands.training.collective.shared_memory import SharedMemory
from manyhands.training.state.layout import Bounds, Lanes
from manyhands.values.errors import Broken
from manyhands.values.world import World

T = TypeVar("T")

CLOSING_S = 5.0
"""A courier asks its patience all the time; only gloo, where nothing is shared, may take longer."""


class UnseenPatience:
    """The courier's patience: it gives up when the worker must, but nobody sees it wait."""

    def __init__(self, patience: Patience, closed: threading.Event) -> None:
        self._patience, self._closed = patience, closed

    def broken(self) -> bool:
        return self._closed.is_set() or self._patience.broken()

    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...


class TwoLevel:
    def __init__(
        self,
        world: World,
        local: SharedMemory,
        between: Callable[[Patience], Collective] | None,
        *,
        patience: Patience,
        slots: Sequence[Lanes] | None = None,
    ) -> None:
        """`between` makes the collective of hosts; it is called where there are several, by those
        who speak for one. `slots`: partial sums elsewhere than in the host's memory."""
        self.world, self.local, self.patience = world, local, patience
        self.slots: Sequence[Lanes] = local.slots if slots is None else slots
        self.many = world.num_hosts > 1
        self.between: Collective | None = None
        self._courier: ThreadPoolExecutor | None = None
        self._failed: BaseException | None = None
        self._sent: Future[Any] | None = None
        self._closed = threading.Event()
        self._unseen = UnseenPatience(patience, self._closed)
        if self.many and world.leads_host:
            assert between is not None, "only workers that share memory can do without"
            self._courier = ThreadPoolExecutor(1, "courier")
            try:
                self.between = self.carry(lambda: between(self._unseen))
            except BaseException:  # nobody has us yet, who would close us
                self.close()
                raise

    def send(self, errand: Callable[[], T]) -> "Future[T]":
        """Let the courier do something between hosts, after all it was sent for before. When one
        errand has failed, so do those that follow."""
        assert self._courier is not None, "one worker speaks for a host"
        sent = self._courier.submit(self._run, errand)
        self._sent = sent
        return sent

    def _run(self, errand: Callable[[], T]) -> T:
        if self._failed is not None:
            raise self._failed
        if self._closed.is_set():
            raise Broken("this view was left")
        try:
            return errand()
        except BaseException as error:
            self._failed = error
            raise

    def carry(self, errand: Callable[[], T]) -> T:
        """The same, and wait for it."""
        with self.patience:
            return self.send(errand).result()

    def readiness(self) -> SequenceWords:
        return self.local.readiness(self._unseen)

    def gather(
        self, mine: Bytes, kind: int = FACTS, stamp: int = 0, meanwhile: Meanwhile = nothing
    ) -> list[Bytes]:
        """Everyone's message, by rank, on all hosts."""
        here = self.local.gather(mine, kind, stamp, meanwhile)
        if not self.many:
            return here
        if self.between is not None:
            self.carry(lambda: self._swap(here, kind, stamp))
        self.local.meet()
        return self.local.rows(range(self.world.num_ranks), kind, len(mine))

    def _swap(self, here: list[Bytes], kind: int, stamp: int) -> None:
        """Tell the other hosts what was said here, and write down what was said there."""
        world, size = self.world, len(here[0])
        message = np.zeros(max(world.hosts) * size, dtype=np.uint8)
        message[: len(here) * size] = np.concatenate(here)
        assert self.between is not None
        for host, theirs in enumerate(self.between.gather(message, kind, stamp)):
            if host != world.host:
                for k, rank in enumerate(world.ranks_of(host)):
                    self.local.put(rank, theirs[k * size : (k + 1) * size], kind, stamp)

    def gather_here(self, mine: Bytes, kind: int, stamp: int) -> list[Bytes]:
        """The messages of this host's workers."""
        return self.local.gather(mine, kind, stamp)

    def meet(self, meanwhile: Meanwhile = nothing, *, awaited: Sequence[int] | None = None) -> None:
        """All workers of this host; what each wrote before, all see after. `meanwhile` is called
        once, before the others are waited for. `awaited`: what these wrote is seen after it, and
        nobody else is waited for; None: all are."""
        self.local.meet(meanwhile, awaited=awaited)

    def exchange(self, counts: Sequence[int], owned: Sequence[Bounds]) -> list[list[Lanes]]:
        assert not self.many, "hosts exchange bucket by bucket"
        return self.local.exchange(counts, owned)

    def share(self, lanes: Lanes, owned: Sequence[Bounds]) -> None:
        self.local.share(lanes, owned)

    def recall(self, kind: int, stamp: int) -> list[Bytes]:
        return self.local.recall(kind, stamp)

    def left_by(self, rank: int) -> Sequence[Lanes]:
        return self.local.left_by(rank)

    def close(self) -> None:
        """The courier is idle on return: it must not write to what the next view uses."""
        self._closed.set()
        if self._courier is not None:
            if self.between is not None:
                self.between.close()
            self._courier.shutdown(wait=False)
            wait([self._sent] if self._sent is not None else [], timeout=CLOSING_S)
        self.local.close()
