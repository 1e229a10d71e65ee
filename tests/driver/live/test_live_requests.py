"""Speaking to a run while it goes on; replaying what it did; changes that survive everything."""

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

import manyhands as mh
from manyhands.accounting import ledger, ledger_lines
from manyhands.accounting.proof import check
from manyhands.driver.live.command_socket import (
    Ask,
    Change,
    CommandSocket,
    Continue,
    Examine,
    Pause,
    Scale,
    StopRun,
    ask,
)
from manyhands.launch.engines.launcher import Launcher
from manyhands.monitor.run_status import status
from manyhands.stories.replay import replay
from manyhands.values import events
from manyhands.values.errors import RequestError
from manyhands.values.run_folder import RunDir
from tests.support.tasks import make

SETTINGS = ["train.batch=32", "train.micro_batch=4", "checkpoint.every_steps=10"]


@dataclass
class Going:
    """A run in a thread of its own."""

    run: RunDir
    step: int = 0
    report: mh.Report | None = None
    error: BaseException | None = None
    stepped: threading.Condition = field(default_factory=threading.Condition)

    def on_step(self, event: events.Stepped) -> None:
        with self.stepped:
            self.step = event.step
            self.stepped.notify_all()

    def wait_for(self, step: int) -> None:
        with self.stepped:
            assert self.stepped.wait_for(lambda: self.step >= step, timeout=60)

    def ask(self, what: Ask) -> str:
        return ask(self.run.control, what, patience_s=60)

    def workers(self) -> int:
        return len(status(self.run)["workers"])


@contextmanager
def going(
    launcher: Launcher,
    to: Path,
    *,
    steps: int,
    workers: int | str = 2,
    settings: Sequence[str] = (),
) -> Iterator[Going]:
    """Train until asked to stop; yields when the first step is done."""
    here = Going(RunDir(to))

    def work() -> None:
        try:
            here.report = mh.train(
                make("cnn"),
                to=to,
                settings=[*SETTINGS, f"train.steps={steps}", *settings],
                quiet=True,
                launcher=launcher,
                on_step=here.on_step,
                workers=workers,
            )
        except BaseException as error:
            here.error = error
        finally:
            here.on_step(events.Stepped(step=10**9, epoch=0, loss=0, lr=0, samples_per_s=0))

    thread = threading.Thread(target=work, name="going")
    thread.start()
    try:
        here.wait_for(1)
        yield here
    finally:
        if thread.is_alive():
            with suppress(RequestError):  # it may just have ended
                here.ask(StopRun())
        thread.join(60)
        assert not thread.is_alive()


LONG = 100_000


def test_scaling_up_and_down(launcher: Launcher, tmp_path: Path) -> None:
    with going(launcher, tmp_path / "run", steps=LONG) as run:
        assert run.ask(Scale(4)).startswith("4 workers since step")
        assert run.ask(Scale(1)).startswith("1 worker since step")
        with pytest.raises(RequestError, match="only 8 micro-batches"):
            run.ask(Scale(9))
        with pytest.raises(RequestError, match="an audit needs two workers"):
            run.ask(Examine())
        run.ask(Scale(3))
        assert "computed the same bits" in run.ask(Examine())
        assert run.ask(StopRun()).startswith("stopping")
    assert isinstance(run.error, mh.Interrupted)
    entries = ledger.read(run.run.ledger)
    proof = check(entries)
    assert proof.ok, proof.problems
    sizes = [len(c.workers) for c in ledger_lines.surviving(entries)]
    assert sizes[0] == 2 and {1, 3, 4} <= set(sizes)
    done = proof.steps
    assert replay(run.run.root, make("cnn"), step=0, to=done, launcher=launcher).same


def test_a_pause(launcher: Launcher, tmp_path: Path) -> None:
    with going(launcher, tmp_path / "run", steps=LONG) as run:
        said = run.ask(Pause())
        step = int(said.removeprefix("paused after step "))
        assert run.ask(Continue()) == "training"
        run.wait_for(step + 3)


def test_settings_change_at_one_step_and_are_replayed(launcher: Launcher, tmp_path: Path) -> None:
    """The change is in the ledger, so a replay on another number of workers has the same bits."""
    folder = tmp_path / "run"
    with going(launcher, folder, steps=LONG) as run:
        for wrong, why in (
            ({"lrr": 1}, "the optimizer has no 'lrr'"),
            ({"lr": "high"}, "is not a number"),
            ({"log.every_steps": 0}, "at least 1"),
            ({"evaluate.every_steps": 5}, "does not evaluate"),
        ):
            with pytest.raises(RequestError, match=why):
                run.ask(Change(wrong))
        said = run.ask(Change({"lr": 0.002, "weight_decay": 0.3, "train.clip_norm": 0.1}))
        step = int(said.rsplit("step ", 1)[1].split()[0])
        run.wait_for(step + 3)
        run.ask(StopRun())
    (changed,) = [
        e for e in ledger.read(run.run.ledger) if isinstance(e, ledger_lines.SettingsChanged)
    ]
    assert changed.step == step and changed.settings["lr"] == 0.002
    done = check(ledger.read(run.run.ledger)).steps
    again = replay(folder, make("cnn"), step=0, to=done, workers=3, launcher=launcher)
    assert again.same and len(again.compared_losses) >= done - 2
    assert again.compared_weights[-1] == done
    # Without the change it would not be the same.
    lines = run.run.ledger.read_bytes().splitlines(keepends=True)
    run.run.ledger.write_bytes(b"".join(ln for ln in lines if b'"Changed"' not in ln))
    assert not replay(folder, make("cnn"), step=0, to=done, launcher=launcher).same


def test_a_change_is_made_again_when_its_steps_are(launcher: Launcher, tmp_path: Path) -> None:
    """Resumed from before the change, which is then in force from the same step on."""
    folder = tmp_path / "run"
    with going(launcher, folder, steps=LONG) as run:
        run.wait_for(21)
        run.ask(Change({"lr": 0.001}))
        run.ask(StopRun())
    stopped = check(ledger.read(run.run.ledger)).steps
    weights = mh.fingerprint(folder)
    for saved in sorted((folder / "checkpoints").iterdir())[1:]:
        saved.rename(saved.with_name(f"not-{saved.name}"))
    report = mh.resume(
        folder, make("cnn"), settings=[f"train.steps={stopped}"], quiet=True, launcher=launcher
    )
    assert report.fingerprint == weights
    proof = check(ledger.read(run.run.ledger))
    assert proof.ok and proof.rewinds and len(proof.changes) == 1


def test_a_change_outlives_everybody_over_gloo(launcher: Launcher, tmp_path: Path) -> None:
    """All die, and the run goes back to a checkpoint from before the change."""
    folder = tmp_path / "run"
    with going(launcher, folder, steps=LONG, settings=["train.collective=gloo"]) as run:
        run.ask(Change({"lr": 0.002, "train.clip_norm": 0.1}))
        run.wait_for(run.step + 2)
        run.ask(Pause())
        for worker in status(run.run)["workers"]:
            os.kill(worker["pid"], signal.SIGKILL)
        run.ask(Continue())
        run.wait_for(run.step + 2)
    proof = check(ledger.read(run.run.ledger))
    assert proof.ok, proof.problems
    assert replay(folder, make("cnn"), step=0, to=proof.steps, launcher=launcher).same


def test_what_cannot_be_asked_for(launcher: Launcher, tmp_path: Path) -> None:
    alone = ["train.sync=alone"]
    with (
        going(launcher, tmp_path / "run", steps=LONG, settings=alone, workers="1:3") as run,
        pytest.raises(RequestError, match="1 to 1 workers"),
    ):
        run.ask(Scale(2))
    with pytest.raises(RequestError, match="one worker"):
        mh.train(make("cnn"), to=tmp_path / "x", workers="2:3", settings=alone, launcher=launcher)


def test_as_many_workers_as_there_is_room_for(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores = [2]
    monkeypatch.setattr("manyhands.driver.workforce.usable_cores", lambda: cores[0])
    with going(launcher, tmp_path / "run", steps=LONG, workers="1:3") as run:
        for wanted in (3, 1):
            cores[0] = wanted if wanted > 1 else 0
            deadline = time.monotonic() + 60
            while run.workers() != wanted:
                assert time.monotonic() < deadline
                run.wait_for(run.step + 1)


def test_a_replay_names_what_differs(launcher: Launcher, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    settings = [*SETTINGS, "train.steps=20"]
    mh.train(make("cnn"), to=folder, workers=2, settings=settings, quiet=True, launcher=launcher)
    assert replay(folder, make("cnn"), step=3, to=6, launcher=launcher).first == 0
    assert replay(folder, make("cnn"), step=12, workers=2, launcher=launcher).first == 10
    other = make("cnn")
    other = mh.Task(
        model=other.model,
        loss=other.loss,
        optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=0.5),
        data=other.data,
    )
    found = replay(folder, other, step=0, to=5, launcher=launcher)
    assert not found.same and "the loss was" in found.differences[0]
    with pytest.raises(RequestError, match="has done 20 steps"):
        replay(folder, make("cnn"), step=20, launcher=launcher)


def test_garbage_on_the_control_socket(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 100) / ("y" * 60)  # longer than a socket's name may be
    deep.mkdir(parents=True)
    path = deep / ".control"
    with pytest.raises(RequestError, match="nobody is training"):
        ask(path, Pause())
    control = CommandSocket(path)
    try:
        assert path.stat().st_mode & 0o777 == 0o600
        folder = os.open(deep, os.O_RDONLY)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
            line.connect(f"/proc/self/fd/{folder}/.control")
            line.send(b"\xff" * 1000)
            assert control.receive() == []  # accepted
            assert control.receive() == []  # hung up on
            line.settimeout(5)
            assert line.recv(10) == b""
        os.close(folder)
    finally:
        control.close()
    assert not path.exists()
