"""Runs with servers, what they prove, and commands to them while they train."""

import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

import manyhands as mh
from manyhands.accounting import ledger
from manyhands.accounting.proof import Proof, check
from manyhands.launch.engines.launcher import Launcher
from manyhands.stories import live
from manyhands.values.errors import Interrupted
from manyhands.values.planned_faults import FaultPlan
from manyhands.values.run_folder import RunDir
from tests.support.tasks import make

Go = Callable[..., mh.Report]


def runs_in(folder: Path, launcher: Launcher, settings: Sequence[str], servers: str) -> Go:
    """Trains there: with these settings and servers, where nothing else is said."""

    def run(
        *more: str,
        kind: str = "cnn",
        workers: int | str = 2,
        name: str = "run",
        sync: str | None = servers,
        faults: FaultPlan | None = None,
        task: mh.Task | None = None,
    ) -> mh.Report:
        return mh.train(
            task or make(kind),
            to=folder / name,
            workers=workers,
            sync=sync,
            settings=[*settings, *more],
            quiet=True,
            launcher=launcher,
            faults=faults,
        )

    return run


@contextmanager
def while_it_trains(go: Go, run: Path, sync: str) -> Generator[None]:
    """A run that would go on for long; it is stopped at the end."""

    def train() -> None:
        with pytest.raises(Interrupted):
            go("train.steps=100000", "recovery.silent_s=60", sync=sync)

    thread = threading.Thread(target=train)
    thread.start()
    try:
        deadline = time.monotonic() + 60
        while not (run / "status.json").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        yield
    finally:
        live.stop(run, 60)
        thread.join(60)


def proven(run: str | Path) -> Proof:
    proof = check(ledger.read(RunDir(Path(run)).ledger))
    assert proof.ok, proof.problems
    return proof
