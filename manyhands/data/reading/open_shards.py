# SPDX-License-Identifier: Apache-2.0
"""Which shards are open: those that are in use, and those that will be.

Shards are opened when they are first asked for. `want` opens some in the background, in a thread
that reads and hashes files and runs nobody else's code; a shard that could not be opened there is
opened again by whoever needs it. `keep` lets go of all others. Nothing here survives a fork: the
owner makes a new one.
"""

import threading
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future

from manyhands.data.shards.shard_file import OpenShard


class OpenShards:
    """`let_go` is called for each shard that was opened, when nothing here holds it any more."""

    def __init__(self, open_one: Callable[[int], OpenShard], let_go: Callable[[int], None]) -> None:
        self._open_one, self._let_go = open_one, let_go
        self._lock = threading.Lock()
        self._ready: dict[int, OpenShard] = {}
        self._opening: dict[int, Future[OpenShard]] = {}
        self._wanted: list[int] = []
        self._thread: threading.Thread | None = None

    def __getitem__(self, shard: int) -> OpenShard:
        found = self._ready.get(shard)
        if found is not None:
            return found
        with self._lock:
            found, opening = self._ready.get(shard), self._opening.get(shard)
            self._wanted = [s for s in self._wanted if s != shard]
        if found is not None:  # by now
            return found
        if opening is not None and opening.exception() is None:  # after waiting for it
            return opening.result()
        found = self._open_one(shard)
        with self._lock:
            self._ready[shard] = found
        return found

    def want(self, shards: Iterable[int]) -> None:
        """Open these in the background, unless they are open."""
        with self._lock:
            self._wanted = [s for s in shards if s not in self._ready and s not in self._opening]
            if self._wanted and self._thread is None:
                self._thread = threading.Thread(target=self._fetch, name="shards", daemon=True)
                self._thread.start()

    def keep(self, shards: Collection[int]) -> None:
        """Close all others; views that somebody holds stay valid."""
        with self._lock:
            gone = [s for s in self._ready if s not in shards]
            for shard in gone:
                del self._ready[shard]
        for shard in gone:
            self._let_go(shard)

    def close(self) -> None:
        with self._lock:
            self._wanted, thread = [], self._thread
        if thread is not None:
            thread.join()
        self.keep(())

    def _fetch(self) -> None:
        while True:
            with self._lock:
                if not self._wanted:
                    self._thread = None
                    return
                shard = self._wanted.pop(0)
                opening = self._opening[shard] = Future[OpenShard]()
            try:
                found = self._open_one(shard)
            except Exception as error:
                opening.set_exception(error)
            else:
                with self._lock:
                    self._ready[shard] = found
                opening.set_result(found)
                del found
            with self._lock:
                del self._opening[shard]
            del opening
