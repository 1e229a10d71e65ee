# SPDX-License-Identifier: Apache-2.0
"""Calls shared out among processes, whose results come one after the other, in the order of calls.

At most twice as many calls are under way as there are processes, so whatever results hold is held
for so many at a time. A call whose process is killed is made again, alone; killed once more, it is
named. Calls must therefore be repeatable.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import BrokenExecutor, Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from manyhands.data.mapreduce.process_pool import Pool
from manyhands.values.errors import DataTaskFailed

T = TypeVar("T")


@dataclass(slots=True)
class _UnderWay(Generic[T]):
    number: int
    args: tuple[Any, ...]
    future: Future[T]


def in_order(
    call: Callable[..., T], calls: Iterable[tuple[Any, ...]], workers: int, *, what: str
) -> Generator[T]:
    """`call(*args)` for each of `calls`. `what`: a call, in words for people ("part")."""
    waiting = iter(enumerate(calls))
    pool, under_way = Pool(workers), deque[_UnderWay[T]]()
    well = False
    try:
        while True:
            while len(under_way) < 2 * workers and (item := next(waiting, None)) is not None:
                under_way.append(_UnderWay(*item, _submitted(pool, call, item[1])))
            if not under_way:
                break
            first = under_way[0]
            try:
                found = first.future.result()
            except BrokenExecutor:
                pool.close(hurry=True)
                pool = Pool(workers)
                found = _alone(pool, call, first, what)
                for other in list(under_way)[1:]:
                    if _is_lost(other.future):
                        other.future = _submitted(pool, call, other.args)
            under_way.popleft()
            yield found
        well = True
    finally:
        pool.close(hurry=not well)


def _submitted(pool: Pool, call: Callable[..., T], args: tuple[Any, ...]) -> Future[T]:
    try:
        return pool.submit(call, *args)
    except BrokenExecutor as error:  # it is noticed when its turn has come
        lost = Future[T]()
        lost.set_exception(error)
        return lost


def _alone(pool: Pool, call: Callable[..., T], again: _UnderWay[T], what: str) -> T:
    """Nothing else is under way: if a process dies now, this call is why."""
    try:
        return pool.submit(call, *again.args).result()
    except BrokenExecutor:
        raise DataTaskFailed(
            f"the process that computed {what} {again.number + 1:,} died twice (killed, or out of "
            "memory). Use fewer workers, or a smaller batch."
        ) from None


def _is_lost(future: Future[Any]) -> bool:
    return not future.done() or isinstance(future.exception(), BrokenExecutor)
