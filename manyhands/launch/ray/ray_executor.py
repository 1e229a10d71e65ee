# SPDX-License-Identifier: Apache-2.0
"""`concurrent.futures.Executor` over Ray: every call is a task on some node that has room for it.

A call may be run again when the process that ran it dies (twice more at the most), so it must be
repeatable; one that kills its process every time ends as BrokenExecutor, as in a process pool.
Calls find themselves in the driver's current directory where their node has it. What they read and
write by path must be there on every node: on several nodes that takes a shared file system.
"""

import os
import pickle
import sys
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Executor, Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle

from manyhands.launch.ray.ray_resources import Resources, actor_options, parse_resources, times
from manyhands.launch.ray.ray_session import Session, address_of
from manyhands.values.environment import search_path
from manyhands.values.errors import RequestError

T = TypeVar("T")

RETRIES = 2
LOOK_S = 60.0


@dataclass(frozen=True, slots=True)
class RayShared:
    """A value that Ray keeps once per node, as an argument of many calls."""

    reference: Any


@dataclass(frozen=True, slots=True)
class _RayRoom:
    """Of a shared value, in the arguments of a call that travels."""

    index: int


class RayExecutor(Executor):
    """Use it as a context. Leaving it waits for what was submitted, then leaves Ray."""

    def __init__(self, session: Session, each: Resources | None = None) -> None:
        self.session, self.ray = session, session.ray
        self.each = each or {"CPU": 1.0}
        self.workers = times(self.each, self.ray.available_resources())
        """How many calls run at once, as things are."""
        if self.workers < 1:
            there = times(self.each, self.ray.cluster_resources())
            busy = "is busy" if there else "has not so much at all"
            raise RequestError(f"the Ray cluster {busy}: a task needs {self.each}.")
        how = actor_options(self.each) | {"max_retries": RETRIES, "retry_exceptions": False}
        self.remote: Any = self.ray.remote(_run).options(**how)
        self.under_way: dict[Future[Any], Any] = {}
        self.closed = False

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        if self.closed:
            raise RuntimeError("cannot schedule new futures after shutdown")
        shared = [a.reference for a in args if isinstance(a, RayShared)]
        places = iter(range(len(shared)))
        plain = [_RayRoom(next(places)) if isinstance(a, RayShared) else a for a in args]
        call = cloudpickle.dumps((fn, plain, kwargs))
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()
        reference = self.remote.remote(call, os.getcwd(), list(sys.path), *shared)
        self.under_way[future] = reference

        def done(found: Future[bytes]) -> None:
            self.under_way.pop(future, None)
            error = found.exception()
            if error is not None:
                future.set_exception(self._lost(error))
                return
            worked, value = pickle.loads(found.result())
            future.set_result(value) if worked else future.set_exception(value)

        reference.future().add_done_callback(done)
        return future

    def put(self, value: Any) -> RayShared:
        """For calls that take it as a positional argument."""
        return RayShared(self.ray.put(value))

    def _lost(self, error: BaseException) -> BaseException:
        """The call neither returned nor raised."""
        kinds = self.ray.exceptions
        cause = " ".join(str(error).split())[:500]
        if isinstance(error, kinds.RayTaskError):  # it could not be unpickled there
            return RequestError(f"a Ray node could not run a task: {cause}")
        if isinstance(error, kinds.RayError):
            return BrokenExecutor(f"Ray lost a task: {cause}")
        return error

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if self.closed:
            return
        self.closed = True
        references = list(self.under_way.values())
        if cancel_futures:
            for reference in references:
                with suppress(Exception):
                    self.ray.cancel(reference, force=True)
        elif wait and references:
            self.ray.wait(references, num_returns=len(references))
        self.session.close()

    def blind_to(self, path: Path) -> list[str]:
        """The nodes that do not see a file which is here."""
        look = self.ray.remote(os.path.exists)
        at = self.ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        whole = str(path.absolute())
        names = {n["NodeID"]: n["NodeName"] for n in self.ray.nodes() if n["Alive"]}
        seen = [
            look.options(num_cpus=0, scheduling_strategy=at(node, soft=False)).remote(whole)
            for node in names
        ]
        found = self.ray.get(seen, timeout=LOOK_S)
        return [name for name, there in zip(names.values(), found, strict=True) if not there]


def open_executor(engine: str, resources: str | None, token_file: Path | None) -> RayExecutor:
    each = parse_resources(resources) if resources else None
    session = Session(address_of(engine), token_file)
    try:
        return RayExecutor(session, each)
    except BaseException:
        session.close()
        raise


def _run(call: bytes, folder: str, path: list[str], *shared: Any) -> bytes:
    """On a node. Exceptions travel as values: Ray's own have a copy of its traceback in them."""
    search_path(path)
    with suppress(OSError):
        os.chdir(folder)
    function, args, kwargs = pickle.loads(call)
    try:
        args = [shared[a.index] if isinstance(a, _RayRoom) else a for a in args]
        found = (True, function(*args, **kwargs))
    except Exception as error:
        found = (False, error)
    return cloudpickle.dumps(found)
