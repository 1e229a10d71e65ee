"""A zoo of ways in which user code ends a worker: each is told, and the right one is blamed."""

import ctypes
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import manyhands as mh
from manyhands.launch.engines.launcher import Launcher
from manyhands.values.run_folder import RunDir

BAD = 21
"""The record that is the end of whoever touches it."""
SETTINGS = [
    "train.batch=16",
    "train.micro_batch=4",
    "train.steps=4",
    "recovery.silent_s=60",  # a busy machine is no reason to be killed
]
QUICK = ["recovery.stuck_s=2", "recovery.evaluate_s=2"]
"""For what never ends."""
SOON = ["recovery.starting_s=5"]
"""For what happens in a first time."""


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ValueError("not even this can be said")


class Undying:
    def __del__(self) -> None:
        raise ValueError("in __del__")


class Dies:
    """A dataset whose only record kills the process that fetches it."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> int:
        os._exit(3)


def raises(error: BaseException) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


def crash() -> None:
    ctypes.string_at(0)


def kill(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def loop() -> None:
    while True:
        time.sleep(0.01)


def deadlock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def recurse() -> None:
    recurse()


def exit_in_a_thread() -> None:
    threading.Thread(target=lambda: os._exit(7)).start()
    time.sleep(60)


def load_with_workers() -> None:
    for _ in DataLoader(Dies(), num_workers=1):  # type: ignore[arg-type]
        pass


ENDS: dict[str, tuple[Callable[[], None], str]] = {
    "an exception": (raises(ValueError("no good")), "ValueError: no good"),
    "sys.exit": (lambda: sys.exit(3), r"the task called exit\(3\)"),
    "os._exit": (lambda: os._exit(3), "exit code 3 without finishing"),
    "os._exit in a thread": (exit_in_a_thread, "exit code 7 without finishing"),
    "a crash": (crash, r"signal 11 \(SIGSEGV\) at \S*test_deaths.py:\d+ in crash"),
    "abort": (os.abort, r"signal 6 \(SIGABRT\) at \S*test_deaths.py:\d+ in"),
    "an endless loop": (loop, "it has made no progress for"),
    "a deadlock": (deadlock, "it has made no progress for"),
    "Ctrl-C": (raises(KeyboardInterrupt()), "KeyboardInterrupt"),
    "no memory": (raises(MemoryError()), "memory ran out"),
    "recursion": (recurse, "RecursionError: maximum recursion depth"),
    "no words": (raises(Unspeakable()), r"Unspeakable \(its text cannot be shown: ValueError\)"),
    "many words": (raises(ValueError("x" * 10_000_000)), "ValueError: xxx"),
    "the end of a generator": (raises(GeneratorExit()), "GeneratorExit"),
    "the end of an iterator": (raises(StopIteration("over")), "StopIteration"),
    "a loader's worker": (load_with_workers, r"DataLoader worker \(pid"),
}
SURVIVED: dict[str, Callable[[], None]] = {
    "a request to go": kill(signal.SIGTERM),
    "an exception in __del__": lambda: del_(Undying()),
}


def del_(thing: object) -> None:
    del thing


class Acting:
    """Records, one of which acts when it is fetched."""

    def __init__(self, act: Callable[[], None] | None = None, n: int = 64) -> None:
        self.act, self.n = act, n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        if self.act is not None and i == BAD:
            self.act()
        return {"x": torch.full((2,), float(i)), "i": torch.tensor(i)}


def task(act: Callable[[], None], at: str) -> mh.Task:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        if at == "loss" and BAD in batch["i"].tolist():
            act()
        return model(batch["x"]).mean()

    def predict(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        if at == "predict" and BAD in batch["i"].tolist():
            act()
        return batch["i"], batch["i"]

    def score(predictions: Tensor, targets: Tensor) -> float:
        if at == "score":
            act()
        return 1.0

    def build() -> nn.Module:
        if at == "model":
            act()
        return nn.Linear(2, 1)

    return mh.Task(
        model=build,
        loss=loss,
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=1e-4),
        data=Acting(act if at == "data" else None),
        held_out=Acting(n=40) if at in ("predict", "score") else None,
        predict=predict if at in ("predict", "score") else None,
        scores={"one": score} if at in ("predict", "score") else {},
    )


def verdict(act: Callable[[], None], at: str, launcher: Launcher, to: Path, *settings: str) -> str:
    with pytest.raises(mh.RunFailed) as caught:
        mh.train(
            task(act, at),
            to=to,
            workers=2,
            settings=[*SETTINGS, *settings],
            quiet=True,
            launcher=launcher,
        )
    assert RunDir(to).verdict.exists()
    assert len(caught.value.verdict) < 50_000
    return caught.value.verdict


@pytest.mark.parametrize("end", ENDS)
def test_the_end_of_a_worker_is_told_with_its_records(
    end: str, launcher: Launcher, tmp_path: Path
) -> None:
    act, expected = ENDS[end]
    at = "data" if end == "the end of an iterator" else "loss"
    quick = QUICK if "no progress" in expected else []
    said = verdict(act, at, launcher, tmp_path / "run", *quick)
    assert re.search(expected, said), said
    place = re.search(r"micro-batch \d+: records (.+)", said)
    assert place is not None, said
    records = place[1].split(", ")
    assert str(BAD) in records and len(records) == 4
    assert "at the same" in said, "it was tried twice, not six times"


@pytest.mark.parametrize(
    ("end", "at", "place"),
    [
        ("an endless loop", "data", r"micro-batch \d+: records .*\b21\b"),
        ("a crash", "data", r"micro-batch \d+: records .*\b21\b"),
        ("an endless loop", "predict", r"held-out batch 5: records 20, 21, 22, 23"),
        ("a crash", "predict", r"held-out batch 5: records 20, 21, 22, 23"),
        ("an exception", "predict", r"held-out batch 5: records 20, 21, 22, 23"),
        ("an endless loop", "score", "in the scores after step 4"),
        ("an endless loop", "model", "it has not come up in 5 s"),
        ("os._exit", "model", "exit code 3"),
    ],
)
def test_wherever_it_is(end: str, at: str, place: str, launcher: Launcher, tmp_path: Path) -> None:
    soon = [*QUICK, *(SOON if at != "data" else [])] if end == "an endless loop" else []
    said = verdict(ENDS[end][0], at, launcher, tmp_path / "run", *soon)
    assert re.search(place, said), said
    if end == "an endless loop":
        assert re.search(r"test_deaths.py:\d+ in loop", said), "and where it was"


@pytest.mark.parametrize("end", SURVIVED)
def test_what_ends_nobody(end: str, launcher: Launcher, tmp_path: Path) -> None:
    report = mh.train(
        task(SURVIVED[end], "loss"),
        to=tmp_path / "run",
        workers=2,
        settings=SETTINGS,
        quiet=True,
        launcher=launcher,
    )
    assert report.step == 4


def test_a_long_evaluation_is_not_judged_by_the_clock_of_a_micro_batch(
    launcher: Launcher, tmp_path: Path
) -> None:
    settings = [*SETTINGS, "recovery.stuck_s=2"]
    report = mh.train(
        task(lambda: time.sleep(3), "predict"),
        to=tmp_path / "run",
        workers=2,
        settings=settings,
        quiet=True,
        launcher=launcher,
    )
    assert (report.step, report.recoveries) == (4, 0)
