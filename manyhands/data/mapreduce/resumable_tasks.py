# SPDX-License-Identifier: Apache-2.0
"""Named tasks over any `concurrent.futures.Executor`, each finished one kept on disk.

A phase is a list of independent tasks. What a task returned is written to `<phase>/<name>.done` by
the driver alone, whole and durable; the next time, a task with the same phase, name and key is not
run again. Tasks must therefore be repeatable: one that was killed half-way is run once more.

Invariant: `TaskRunner.do` returns the same list whatever the executor, the number of workers, and
however often it was interrupted before. At most 2 x workers tasks are under way at any time.
"""

import errno
import hashlib
import pickle
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

import cloudpickle
import msgspec

from manyhands.data.mapreduce.process_pool import Pool
from manyhands.values.errors import DataError, DataTaskFailed, ManyhandsError
from manyhands.values.machine import usable_cores
from manyhands.values.run_folder import write_whole
from manyhands.values.user_frames import user_traceback

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DataTask:
    """One call: `run(*args)`. It returns what msgspec can encode, a Struct as a rule."""

    name: str
    """Unique in its phase, and fit to be a file's name."""
    run: Callable[..., Any]
    args: tuple[Any, ...] = ()
    nbytes: int = 0
    """About how much data it works on, for progress."""
    key: str = ""
    """What the result depends on beside the name: a checkpoint of another key is not used."""


@dataclass(frozen=True, slots=True)
class PhaseProgress:
    phase: str
    done: int
    """Tasks that are finished, those of an earlier run included."""
    total: int
    done_bytes: int
    total_bytes: int


class Submits(Protocol):
    """The part of an Executor that is used."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]: ...


class TaskRunner:
    """Runs phases. Use it as a context: leaving it ends the processes it started.

    Without an executor the tasks run in `workers` processes of its own, or right here when there is
    one worker, or nothing but a single task to do. `executor` needs only `submit`; `workers` then
    says how many tasks it runs at once, and whoever made it closes it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        workers: int | None = None,
        executor: Executor | Submits | None = None,
        progress: Callable[[PhaseProgress], None] | None = None,
    ) -> None:
        self.folder = folder
        self.workers = usable_cores() if workers is None else workers
        if self.workers < 1:
            raise DataError(f"workers = {workers}: give at least 1.")
        self.progress = progress
        self.executor = executor
        self.pool: Pool | None = None

    def __enter__(self) -> "TaskRunner":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(hurry=error is not None)

    def close(self, *, hurry: bool = False) -> None:
        """End our processes; in a hurry, in the middle of whatever they do."""
        if self.pool is not None:
            self.pool.close(hurry=hurry)
            self.pool = None

    def do(self, phase: str, tasks: Sequence[DataTask], result: type[T]) -> list[T]:
        """The results of all tasks, in their order.

        When a task fails, those that have begun are waited for and kept, and the first failure in
        the order of tasks is raised: a DataError as it is, anything else as DataTaskFailed.
        """
        kept = _PhaseTasks(self.folder / phase, tasks, result, self.progress)
        todo = deque(i for i in range(len(tasks)) if not kept.reuse(i))
        if self.executor is None and (self.workers == 1 or (not self.pool and len(todo) == 1)):
            for i in todo:
                kept.finish(i, _work(tasks[i], phase))
            return kept.results()
        while todo:
            lost = self._run(todo, kept)
            if lost and self.executor is not None:
                raise DataTaskFailed(_died(phase, [tasks[i].name for i in lost], "died"))
            # One by one: now it is known which of them, if any, kills its process. Whether it had
            # begun when the pool broke is not, so each may die once more.
            for i in lost:
                if self._run(deque([i]), kept) and self._run(deque([i]), kept):
                    raise DataTaskFailed(_died(phase, [tasks[i].name], "died twice"))
        return kept.results()

    def _run(self, todo: deque[int], kept: "_PhaseTasks[T]") -> list[int]:
        """Run tasks until there are none, or until a process dies: then those that were lost."""
        under_way: dict[Future[bytes], int] = {}
        ended: SimpleQueue[Future[bytes]] = SimpleQueue()
        failed: dict[int, ManyhandsError] = {}
        lost: list[int] = []
        try:
            while True:
                while todo and len(under_way) < 2 * self.workers and not failed and not lost:
                    i = todo.popleft()
                    try:
                        future = self._submit(kept.tasks[i], kept.folder.name)
                    except BrokenExecutor:
                        lost.append(i)
                        break
                    under_way[future] = i
                    future.add_done_callback(ended.put)
                if not under_way:
                    break
                future = ended.get()
                i = under_way.pop(future)
                if future.cancelled():
                    continue
                error = future.exception()
                if isinstance(error, BrokenExecutor):
                    lost.append(i)
                elif isinstance(error, Exception):
                    failed[i] = _explained(error, kept.folder.name, kept.tasks[i].name)
                    for other in list(under_way):
                        other.cancel()
                else:
                    kept.finish(i, future.result())
        except BaseException:
            for other in under_way:
                other.cancel()
            self.close(hurry=True)
            raise
        if lost:
            self.close(hurry=True)
        if failed:
            raise failed[min(failed)] from None
        return sorted(lost)

    def _submit(self, task: DataTask, phase: str) -> Future[bytes]:
        try:
            # The executor's own pickle knows neither lambdas nor what is defined in __main__.
            call = cloudpickle.dumps((task.run, task.args))
        except Exception as error:
            raise DataError(
                f"{phase}, task {task.name}: cannot be sent to a worker: {error}. Open files, "
                "locks and connections inside the function, not outside."
            ) from error
        if self.executor is not None:
            return self.executor.submit(_call, call, phase, task.name)
        if self.pool is None:
            self.pool = Pool(self.workers)
        return self.pool.submit(_call, call, phase, task.name)


def _call(call: bytes, phase: str, name: str) -> bytes:
    """In a worker: the task's result, encoded. Only the driver's own calls come this way."""
    try:
        run, args = pickle.loads(call)
    except Exception as error:
        raise _explained(error, phase, name) from None
    return _work(DataTask(name, run, args), phase)


def _work(task: DataTask, phase: str) -> bytes:
    try:
        return msgspec.msgpack.encode(task.run(*task.args))
    except Exception as error:
        # Tracebacks do not travel: what is worth knowing is put into words here.
        raise _explained(error, phase, task.name) from None


def _explained(error: Exception, phase: str, name: str) -> ManyhandsError:
    if isinstance(error, ManyhandsError):
        return error
    where = f"{phase}, task {name}"
    if isinstance(error, MemoryError):
        return DataTaskFailed(f"{where}: out of memory. Use fewer workers, or a smaller memory.")
    if isinstance(error, OSError) and is_full(error):
        return DataTaskFailed(f"{where}: the disk is full. What is finished is kept: make room.")
    return DataTaskFailed(f"{where} failed:\n{user_traceback(error)}")


def is_full(error: OSError) -> bool:
    """Whether it is for want of room on a disk."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def _died(phase: str, names: Sequence[str], how: str) -> str:
    which = f"task {names[0]}" if len(names) == 1 else f"one of the tasks {', '.join(names)}"
    return (
        f"{phase}: the worker process that ran {which} {how} (killed, or out of memory). What is "
        "finished is kept: run the same again, with fewer workers or a smaller memory."
    )


class _FinishedTask(msgspec.Struct, frozen=True):
    digest: str
    result: msgspec.Raw


class _PhaseTasks(Generic[T]):
    """The checkpoints of one phase, and what is known so far."""

    def __init__(
        self,
        folder: Path,
        tasks: Sequence[DataTask],
        result: type[T],
        progress: Callable[[PhaseProgress], None] | None,
    ) -> None:
        self.folder, self.tasks, self.progress = folder, tasks, progress
        self.decoder = msgspec.msgpack.Decoder(result)
        self.found: dict[int, T] = {}
        self.done_bytes = 0
        self.total_bytes = sum(task.nbytes for task in tasks)
        names = {task.name for task in tasks}
        assert len(names) == len(tasks), "two tasks of a phase have the same name"
        assert not any("/" in name or name.startswith(".") for name in names)
        with _disk(folder):
            folder.mkdir(parents=True, exist_ok=True)

    def reuse(self, i: int) -> bool:
        """Whether this task was finished before. A checkpoint that cannot be read counts for
        nothing: the task is simply done again."""
        with suppress(OSError, msgspec.DecodeError):
            done = msgspec.msgpack.decode(self._path(i).read_bytes(), type=_FinishedTask)
            if done.digest == self._digest(i):
                self._add(i, self.decoder.decode(done.result))
        return i in self.found

    def finish(self, i: int, encoded: bytes) -> None:
        result = self.decoder.decode(encoded)
        done = _FinishedTask(self._digest(i), msgspec.Raw(encoded))
        with _disk(self.folder):
            write_whole(self._path(i), msgspec.msgpack.encode(done))
        self._add(i, result)

    def results(self) -> list[T]:
        return [self.found[i] for i in range(len(self.tasks))]

    def _add(self, i: int, result: T) -> None:
        self.found[i] = result
        self.done_bytes += self.tasks[i].nbytes
        if self.progress is not None:
            self.progress(
                PhaseProgress(
                    self.folder.name,
                    len(self.found),
                    len(self.tasks),
                    self.done_bytes,
                    self.total_bytes,
                )
            )

    def _path(self, i: int) -> Path:
        return self.folder / f"{self.tasks[i].name}.done"

    def _digest(self, i: int) -> str:
        return digest_of(self.folder.name, self.tasks[i].name, self.tasks[i].key)


@contextmanager
def _disk(folder: Path) -> Generator[None]:
    """Trouble with the folder is the user's to mend: full, read-only, not ours."""
    try:
        yield
    except OSError as error:
        what = f"{error.strerror}: {error.filename or folder}. What is finished is kept."
        raise DataTaskFailed(what) from error


def digest_of(*parts: str | bytes | int) -> str:
    """A name for these values together, the same in every process."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()
