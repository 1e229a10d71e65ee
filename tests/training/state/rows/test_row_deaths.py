"""Wherever a writer dies, a successor who is given the same push comes to the same bits."""

import os
import random
import signal
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

from manyhands.training.state import rows as room
from manyhands.training.state.rows.row_hash import BUCKETS
from manyhands.training.state.rows.row_journal import RowJournal
from manyhands.training.state.rows.row_store import RowStore
from tests.support.hands import segment
from tests.training.state.rows.stores import crowd, gradient, is_sound, table, without_native

HERE = os.path.dirname(room.__file__)
IDS = crowd(70, buckets=2)
STEPS = 6


class Died(BaseException):
    """Stands for SIGKILL: nothing of ours catches it."""


@dataclass
class Deadly:
    """A death at the n-th store to what is shared, halfway through it, or at the n-th line."""

    store_number: int | None = None
    line_number: int | None = None
    stores: int = 0
    lines: int = 0
    died: bool = False
    _undo: Callable[[RowJournal], None] = field(default=RowJournal.undo)

    def die(self) -> None:
        self.died = True
        raise Died

    def store(self, whole: Callable[[], None], half: Callable[[], None]) -> None:
        self.stores += 1
        if self.died or self.stores - 1 == self.store_number:
            if not self.died:
                half()
            self.die()
        whole()

    def trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(HERE):
            return None
        self.lines += 1
        if self.lines - 1 == self.line_number:
            self.die()
        return self.trace

    @contextmanager
    def strikes(self, store: RowStore, patch: pytest.MonkeyPatch) -> Generator[None]:
        def undo(journal: RowJournal) -> None:
            if not self.died:  # the dead do not repair
                self._undo(journal)

        with patch.context() as here:
            here.setattr(RowJournal, "undo", undo)
            if self.store_number is not None:
                _watch_stores(store, here, self)
            if self.line_number is not None:
                sys.settrace(self.trace)
            try:
                yield
            except Died:
                pass
            finally:
                sys.settrace(None)


class Watched(np.ndarray[Any, Any]):
    """Shared memory whose stores are told to a Deadly."""

    deadly: Deadly

    def __array_finalize__(self, whole: Any) -> None:
        if hasattr(whole, "deadly"):
            self.deadly = whole.deadly

    def __setitem__(self, where: Any, value: Any) -> None:
        target = self.view(np.ndarray)

        def half() -> None:
            values = np.broadcast_to(value, np.shape(target[where])).ravel()
            if target.ndim == 1:
                every = slice(where, where + 1) if isinstance(where, int) else where
                places = (
                    np.arange(*every.indices(len(target))) if isinstance(every, slice) else every
                )
            else:
                places = np.arange(target.size).reshape(target.shape)[where].ravel()
            places = np.flatnonzero(places) if places.dtype == np.bool_ else places
            target.reshape(-1)[places[: len(places) // 2]] = values[: len(places) // 2]

        self.deadly.store(lambda: target.__setitem__(where, value), half)


def _watch_stores(store: RowStore, patch: pytest.MonkeyPatch, deadly: Deadly) -> None:
    def watched(array: Any) -> Any:
        view = array.view(Watched)
        view.deadly = deadly
        return view

    names = ["head", "mask", "words", "claimed", "slots", "places", "values", "last"]
    owners: list[tuple[Any, list[str]]] = [
        (store.journal, names),
        (
            store.index,
            ["keys", "values", "words", *(["last"] if store.index.last is not None else [])],
        ),
        (store.slots, ["words", "_given_back"]),
        (store, ["words"]),
    ]
    for owner, attributes in owners:
        for name in attributes:
            patch.setattr(owner, name, watched(getattr(owner, name)))
    cells = {name: watched(lane) for name, lane in store.slots.cells.items()}
    patch.setattr(store.slots, "cells", cells)
    pairs = [(watched(a), b) for a, b in getattr(store.journal, "_cells")]  # noqa: B009
    patch.setattr(store.journal, "_cells", pairs)


Settings = dict[str, Any]
KINDS: dict[str, Settings] = {
    "plain": {"kind": "adam"},
    "admitted": {"kind": "adagrad", "admit": 2},
    "expiring": {"kind": "rowwise_adagrad", "admit": 2, "expire": 2},
}


def push(store: RowStore, step: int) -> None:
    chosen = np.random.default_rng(step).permutation(len(IDS))[: 10 + 9 * step % 50]
    ids = IDS[np.sort(chosen)]
    store.apply(ids, gradient(ids, 5, step), step)
    if step % 2 == 0:
        store.sweep(np.arange(BUCKETS))


def calm_digests(settings: Settings) -> list[str]:
    calm = table(**settings)
    found = [calm.digest()]
    for step in range(1, STEPS + 1):
        push(calm, step)
        found.append(calm.digest())
    return found


def live_on(fd: int, settings: Settings, expected: list[str]) -> None:
    """Whoever comes next finds one step or the other, and reaches what the calm one did."""
    successor = table(fd=fd, **settings)
    successor.repair()
    is_sound(successor)
    low, high = successor.steps()
    assert low == high and successor.digest() == expected[low]
    for step in range(low, STEPS + 1):
        push(successor, step) if step else None
    assert successor.digest() == expected[-1]
    is_sound(successor)


def deaths(settings: Settings, at: int, patch: pytest.MonkeyPatch, **place: int) -> bool:
    """One dies in step `at`, the next in repairing it (if it comes so far), the third lives."""
    with segment() as fd:
        first = table(fd=fd, **settings)
        for step in range(1, at):
            push(first, step)
        deadly = Deadly(**place)
        with deadly.strikes(first, patch):
            push(first, at)
        if not deadly.died:
            return False
        mender = table(fd=fd, **settings)
        again = Deadly(**{name: n % 13 for name, n in place.items()})
        with again.strikes(mender, patch):
            mender.repair()
        live_on(fd, settings, EXPECTED[str(settings)])
        return True


EXPECTED: dict[str, list[str]] = {}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("what", "stride"),
    [
        ("store_number", 7),
        ("line_number", 61),
        pytest.param("store_number", 1, marks=pytest.mark.slow),
        pytest.param("line_number", 5, marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(600)
def test_a_death_anywhere_leaves_no_trace(
    kind: str, what: str, stride: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    settings = KINDS[kind]
    if what == "store_number":
        without_native(monkeypatch)  # its stores: test_row_passes.py
    EXPECTED[str(settings)] = calm_digests(settings)
    count = 0
    for at in (2, 4, 5):
        n = at % stride  # not the same ones in each
        while deaths(settings, at, monkeypatch, **{what: n}):
            count, n = count + 1, n + stride
    assert count > 10, count


@pytest.mark.parametrize("steps", [30, pytest.param(150, marks=pytest.mark.slow)])
@pytest.mark.timeout(600)
def test_killed_processes_leave_no_trace(steps: int) -> None:
    """SIGKILL, whenever it comes; hundreds of times, if there is time for it."""
    torch.set_num_threads(1)
    rng, settings, kills, torn = random.Random(1), KINDS["expiring"], 0, 0
    calm = table(**settings)
    for step in range(1, steps + 1):
        push(calm, step)
    with segment() as fd:
        while True:
            started, ready = os.pipe()
            if (child := os.fork()) == 0:
                store = table(fd=fd, **settings)
                store.repair()
                os.write(ready, b"!")
                for step in range(store.steps()[0] + 1, steps + 1):
                    push(store, step)
                os._exit(0)
            os.read(started, 1)
            os.close(started), os.close(ready)
            time.sleep(rng.uniform(0, 0.006))
            os.kill(child, signal.SIGKILL)
            if os.waitpid(child, 0)[1] == 0:
                break
            kills, torn = kills + 1, torn + is_torn(fd, settings)
        store = table(fd=fd, **settings)
        assert store.repair() == 0 and store.steps() == (steps, steps)
        assert store.digest() == calm.digest()
        is_sound(store)
    assert kills > steps // 20 and torn > steps // 30, (kills, torn)


def is_torn(fd: int, settings: Settings) -> bool:
    return bool(table(fd=fd, **settings).journals.heads[:, 0].any())
