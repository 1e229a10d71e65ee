"""Hands come and go, and the weights are the calm run's: every fault at every moment."""

import itertools
import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.accounting import ledger, ledger_lines
from manyhands.accounting.proof import check
from manyhands.launch.engines.fork_agent import WorkerExit
from manyhands.launch.engines.launcher import Launcher
from manyhands.launch.engines.local_processes import Local
from manyhands.launch.engines.memory_segments import create_segments
from manyhands.stories.replay import replay
from manyhands.values import events
from manyhands.values.errors import RunFailed
from manyhands.values.planned_faults import FaultPlan
from manyhands.values.run_folder import RunDir
from tests.support.tasks import make

SETTINGS = ["train.batch=32", "train.micro_batch=4", "train.steps=10", "recovery.silent_s=1"]
STEPS = 10

Go = Callable[..., mh.Report]


@pytest.fixture
def go(launcher: Launcher, tmp_path: Path) -> Go:
    def train(
        faults: FaultPlan | None = None,
        *settings: str,
        workers: int | str = 3,
        kind: str = "cnn",
        name: str = "run",
        scored: bool = False,
    ) -> mh.Report:
        task = make(kind)
        report = mh.train(
            replace(task, held_out=task.data) if scored else task,
            to=tmp_path / name,
            workers=workers,
            settings=[*SETTINGS, *settings],
            quiet=True,
            launcher=launcher,
            faults=faults,
        )
        proof = check(ledger.read(RunDir(Path(report.run)).ledger))
        assert proof.ok, proof.problems
        assert proof.steps == report.step
        return report

    return train


@pytest.fixture(scope="module")
def calm(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """The fingerprint of one undisturbed worker."""
    known: dict[tuple[str, ...], str] = {}

    def fingerprint(*settings: str, kind: str = "cnn") -> str:
        key = (kind, *settings)
        if key not in known:
            report = mh.train(
                make(kind),
                to=tmp_path_factory.mktemp("calm") / "run",
                workers=1,
                settings=[*SETTINGS, *settings],
                quiet=True,
                launcher=launcher,
            )
            known[key] = report.fingerprint
        return known[key]

    return fingerprint


def seen(report: mh.Report, kind: type) -> list[object]:
    return [e for e in events.read_events(RunDir(Path(report.run)).events) if isinstance(e, kind)]


MOMENTS = ("begin", "compute", "gather", "update", "share")


@pytest.mark.parametrize("at", MOMENTS)
@pytest.mark.parametrize("rank", [0, 2])
def test_a_killed_worker(go: Go, calm: Callable[..., str], at: str, rank: int) -> None:
    report = go(FaultPlan().kill(rank=rank, at_step=4, at=at), "train.clip_norm=0.5")
    assert report.fingerprint == calm("train.clip_norm=0.5")
    assert report.recoveries == 1


@pytest.mark.parametrize("kind", ["lstm", "odd", "own", "augmented", "cnn-sgd"])
def test_a_worker_killed_in_its_update(go: Go, calm: Callable[..., str], kind: str) -> None:
    report = go(FaultPlan().kill(rank=1, at_step=4, at="update"), kind=kind)
    assert report.fingerprint == calm(kind=kind)


def test_a_killed_worker_over_gloo(go: Go, calm: Callable[..., str]) -> None:
    for k, at in enumerate(("gather", "update", "share")):
        faults = FaultPlan().kill(rank=k % 3, at_step=4, at=at)
        report = go(faults, "train.collective=gloo", name=at)
        assert report.fingerprint == calm()
        assert report.recoveries == 1


@pytest.mark.parametrize("at", ["begin", "gather", "update", "share"])
def test_all_are_killed_at_once(go: Go, calm: Callable[..., str], at: str) -> None:
    """The host's memory is intact: the run goes on from there, and nothing is read from disk."""
    faults = FaultPlan()
    for rank in range(3):
        faults = faults.kill(rank=rank, at_step=4, at=at)
    report = go(faults, "train.clip_norm=0.5")
    assert report.fingerprint == calm("train.clip_norm=0.5")
    views = seen(report, events.Viewed)
    assert all(v.first_step >= 4 for v in views[1:])  # type: ignore[attr-defined]


def test_all_are_killed_over_gloo_and_a_checkpoint_is_left(
    go: Go, calm: Callable[..., str]
) -> None:
    faults = FaultPlan().kill(rank=0, at_step=5).kill(rank=1, at_step=5)
    report = go(faults, "train.collective=gloo", "checkpoint.every_steps=3", workers=2)
    assert report.fingerprint == calm()


def test_the_only_worker(go: Go, calm: Callable[..., str]) -> None:
    assert go(FaultPlan().kill(rank=0, at_step=4, at="update"), workers=1).fingerprint == calm()


def test_two_at_once_and_the_newest_joiner(go: Go, calm: Callable[..., str]) -> None:
    faults = FaultPlan().kill(rank=0, at_step=3, at="update").kill(rank=1, at_step=3, at="share")
    for late in range(3, 6):  # replacements: killed as they take their place, whenever that is
        for step in range(3, 10):
            faults = faults.kill(rank=late, at_step=step, at="regroup")
    report = go(faults)
    assert report.fingerprint == calm()


def test_killed_while_a_view_is_formed(go: Go, calm: Callable[..., str]) -> None:
    """The leader of the recovery dies in it, and so does the next one."""
    faults = FaultPlan().kill(rank=2, at_step=4, at="update")
    faults = faults.kill(rank=0, at_step=4, at="regroup").kill(rank=1, at_step=4, at="regroup")
    assert go(faults).fingerprint == calm()


@pytest.mark.parametrize("at", ["save", "written"])
@pytest.mark.parametrize("step", [6, STEPS])
def test_killed_during_a_save(go: Go, calm: Callable[..., str], at: str, step: int) -> None:
    report = go(FaultPlan().kill(rank=1, at_step=step, at=at), "checkpoint.every_steps=3")
    assert report.fingerprint == calm()
    assert not list(Path(report.run).glob("checkpoints/.*"))


@pytest.mark.parametrize("workers", [2, 3])
def test_a_save_that_is_lost_with_its_writer_is_made_after_the_recovery(
    go: Go, workers: int
) -> None:
    """Rank 1 never gets to say that it has written its part of step 20, and dies at step 23."""
    faults = FaultPlan().kill(rank=1, at_step=23)
    for step in range(20, 23):  # whichever it is at by then: writing goes on beside training
        faults = faults.loop(rank=1, at_step=step, at="written")
    for step in range(24, 39):  # time to be told
        faults = faults.slow(rank=0, at_step=step, seconds=0.05)
    report = go(faults, "train.steps=40", "checkpoint.every_steps=20", workers=workers)
    assert report.recoveries == 1
    made, *others = [e.step for e in seen(report, events.Saved)]  # type: ignore[attr-defined]
    assert 23 < made < 40 and others == [40]


def test_killed_while_scoring(go: Go, calm: Callable[..., str]) -> None:
    """Scores are those of the calm run, and there is one set of them for each step."""
    faults = FaultPlan().kill(rank=1, at_step=6, at="save")
    settings = ("evaluate.every_steps=3", "checkpoint.every_steps=3")
    report = go(faults, *settings, scored=True)
    quiet = go(None, *settings, name="quiet", workers=2, scored=True)
    assert report.scores == quiet.scores
    steps = [e.step for e in seen(report, events.Evaluated)]  # type: ignore[attr-defined]
    assert sorted(set(steps)) == [3, 6, 9, 10]


def test_a_worker_that_hangs_in_its_update(go: Go, calm: Callable[..., str]) -> None:
    """SIGSTOP: noticed by its heartbeat, fenced before anybody goes on, replaced."""
    report = go(FaultPlan().hang(rank=1, at_step=4, at="update"))
    assert report.fingerprint == calm()
    (lost,) = seen(report, events.Lost)
    assert "has not been heard of" in lost.what  # type: ignore[attr-defined]
    with pytest.raises(ProcessLookupError):  # nothing is there that could be continued
        os.kill(lost.pid, signal.SIGCONT)  # type: ignore[attr-defined]


def test_an_endless_loop_in_user_code(go: Go, calm: Callable[..., str]) -> None:
    """It still beats: progress is watched too."""
    report = go(FaultPlan().loop(rank=2, at_step=4), "recovery.stuck_s=1")
    assert report.fingerprint == calm()
    (lost,) = seen(report, events.Lost)
    assert "no progress" in lost.what  # type: ignore[attr-defined]


@pytest.fixture
def frozen(tmp_path: Path) -> Generator[Path]:
    """A file system on which whoever writes sits in the kernel and cannot even be killed."""
    image, mount = tmp_path / "image", tmp_path / "disk"
    mount.mkdir()
    with image.open("wb") as file:
        file.truncate(16 << 20)
    made = [["mkfs.ext4", "-q", str(image)], ["mount", "-o", "loop", str(image), str(mount)]]
    for command in [*made, ["fsfreeze", "-f", str(mount)]]:
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=20)
        except (OSError, subprocess.CalledProcessError) as error:
            subprocess.run(["umount", "-l", str(mount)], capture_output=True, check=False)
            pytest.skip(f"no file system can be mounted and frozen here: {error}")
    try:
        yield mount
    finally:
        subprocess.run(["fsfreeze", "-u", str(mount)], check=True)
        subprocess.run(["umount", "-l", str(mount)], check=True)


def test_a_worker_that_cannot_even_be_killed(
    launcher: Launcher, tmp_path: Path, calm: Callable[..., str], frozen: Path
) -> None:
    """It sits in the kernel (a disk that does not answer), and nobody waits for its end."""
    task, first, calls = make("cnn"), tmp_path / "first", itertools.count()
    inner = task.loss
    assert inner is not None

    def writes(model: Any, batch: Any) -> Any:
        if next(calls) > 15 and not first.exists():  # what is done for the first time may take long
            first.touch()
            (frozen / "notes").write_text("never written")
        return inner(model, batch)

    report = mh.train(
        replace(task, loss=writes),
        to=tmp_path / "run",
        workers=3,
        settings=[*SETTINGS, "recovery.stuck_s=1"],
        quiet=True,
        launcher=launcher,
    )
    assert report.fingerprint == calm()
    losses = seen(report, events.Lost)
    assert any("no progress" in lost.what for lost in losses)  # type: ignore[attr-defined]
    stat = Path(f"/proc/{losses[0].pid}/stat").read_text()  # type: ignore[attr-defined]
    assert stat.rpartition(")")[2].split()[0] == "D", "it was there all the time"


def test_a_preemption_notice(go: Go, calm: Callable[..., str]) -> None:
    """It finishes its step, hands over and leaves: nothing is computed again."""
    report = go(FaultPlan().leave(rank=1, at_step=4))
    assert report.fingerprint == calm()
    assert report.recoveries == 0
    assert not seen(report, events.Lost)
    assert any("told to go" in v.because for v in seen(report, events.Viewed))  # type: ignore[attr-defined]


def test_a_worker_that_ends_without_a_word(go: Go, calm: Callable[..., str]) -> None:
    report = go(FaultPlan().exit(rank=0, at_step=3))
    assert report.fingerprint == calm()


def test_an_exception_is_tried_once_more_elsewhere(go: Go, calm: Callable[..., str]) -> None:
    report = go(FaultPlan().fail(rank=1, at_step=4))
    assert report.fingerprint == calm()
    (warned,) = [e for e in seen(report, events.Warned) if "suspect" in e.text]  # type: ignore[attr-defined]
    assert "worker 1 failed at step 4, micro-batch 3" in warned.text  # type: ignore[attr-defined]


def test_a_slow_worker_is_dealt_less(go: Go, calm: Callable[..., str]) -> None:
    settings = ("train.steps=120", "train.micro_batch=2")
    faults = FaultPlan().slow(rank=1, at_step=0, times=8)
    report = go(faults, *settings, workers=2, kind="lstm")
    assert report.fingerprint == calm(*settings, kind="lstm")
    speeds = [
        c.speeds for c in ledger_lines.surviving(ledger.read(RunDir(Path(report.run)).ledger))
    ]
    assert speeds[0] == [1.0, 1.0]
    assert speeds[-1][1] < speeds[-1][0]


def test_a_worker_that_computes_wrongly_is_named_and_replaced(
    go: Go, calm: Callable[..., str]
) -> None:
    for workers in (2, 3):  # of two, nobody knows who is right: a third is asked
        faults = FaultPlan().corrupt(rank=1, at_step=3)
        report = go(faults, "train.audit_every=1", workers=workers, name=f"run{workers}")
        assert report.fingerprint == calm()
        found = [e for e in seen(report, events.Audited) if e.guilty]  # type: ignore[attr-defined]
        assert [e.guilty for e in found] == [[1]]  # type: ignore[attr-defined]


class Hoarder(nn.Module):
    """It keeps what no checkpoint has: two computations of one micro-batch differ."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.seen = nn.Linear(8, 1), list[int]()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(x))
        return self.head(x) * len(self.seen)


def test_a_task_that_keeps_something_is_suspected_and_what_is_named_is_there(
    launcher: Launcher, tmp_path: Path
) -> None:
    """The folder of a replay goes with it, so neither its log nor its checkpoint is."""
    task = mh.Task(
        model=Hoarder,
        loss=lambda model, batch: model(batch["x"]).square().mean(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-6),
        data={"x": torch.ones(64, 8)},
    )
    arguments: dict[str, Any] = {"workers": 2, "launcher": launcher, "quiet": True}
    settings = [*SETTINGS, "train.steps=4", "checkpoint.every_steps=2"]
    run = tmp_path / "run"
    mh.train(task, to=run, settings=settings, **arguments)
    with pytest.raises(RunFailed) as told:
        replay(run, task, step=2, to=4, audit=True, **arguments)
    page = told.value.verdict
    assert page.startswith("The replay failed at step ") and " on ;" not in page
    assert "keeps from one micro-batch to the next" in page
    assert "  saved" not in page and "  log" not in page and "/tmp/manyhands" not in page
    with pytest.raises(RunFailed) as told:
        mh.train(
            task, to=tmp_path / "live", settings=[*settings, "train.audit_every=1"], **arguments
        )
    assert "keeps from one micro-batch to the next" in told.value.verdict
    assert "mh.resume(" in told.value.verdict
    views = [
        e.because
        for e in events.read_events(tmp_path / "live" / "events.jsonl")
        if isinstance(e, events.Viewed)
    ]
    assert views[1:] == ["workers computed a micro-batch differently"]


class FirstSight(nn.Module):
    """Of what it keeps every worker has its own, and agrees with itself."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.first = nn.Linear(8, 1), list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        self.first = self.first or [x.detach().mean(0)]
        return self.head(x - self.first[0])


def test_workers_that_never_agree_are_told_what_else_it_may_be(
    launcher: Launcher, tmp_path: Path
) -> None:
    task = mh.Task(
        model=FirstSight,
        loss=lambda model, batch: model(batch["x"]).square().mean(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        data={"x": torch.randn(64, 8, generator=torch.Generator().manual_seed(1))},
    )
    with pytest.raises(RunFailed) as told:
        mh.train(
            task,
            to=tmp_path / "run",
            workers=2,
            settings=[*SETTINGS, "train.audit_every=1", "recovery.losses=2"],
            quiet=True,
            launcher=launcher,
        )
    page = told.value.verdict
    assert "no majority: one computes wrongly, or the task keeps something" in page, page


def test_the_verdict_of_a_recovery(go: Go) -> None:
    report = go(FaultPlan().kill(rank=1, at_step=4, at="gather"))
    verdict = json.loads(RunDir(Path(report.run)).verdict.read_text())
    assert verdict["outcome"] == "recovered"
    assert (verdict["rank"], verdict["went_on_at"]) == (1, 4)
    assert "killed by signal 9" in verdict["what"]
    assert verdict["noticed_by"] == "the host agent saw it end"
    assert verdict["recomputed"] == 8 and verdict["seconds"] > 0
    assert re.search("[23] workers went on", verdict["decided"])  # a quick replacement counts


@pytest.mark.parametrize(
    ("at_step", "at", "settings"),
    [
        (STEPS, "save", ()),
        (STEPS, "written", ("train.collective=gloo",)),
        (STEPS - 1, "share", ()),
    ],
)
def test_the_loss_outlives_those_who_took_the_last_step(
    go: Go, at_step: int, at: str, settings: tuple[str, ...]
) -> None:
    calm = go(None, *settings, name="calm", scored=True)
    faults = FaultPlan()
    for rank in range(3):
        faults = faults.kill(rank=rank, at_step=at_step, at=at)
    report = go(faults, *settings, scored=True)
    assert report.recoveries >= 1
    assert (report.loss, report.scores) == (calm.loss, calm.scores)
    logged = [event.step for event in seen(report, events.Stepped)]  # type: ignore[attr-defined]
    assert settings or logged == [1, STEPS], "each once, if nothing was computed again"


def test_losses_without_progress_end_the_run(go: Go) -> None:
    faults = FaultPlan()
    for rank in range(20):  # they may go in pairs, and the first four steps count as progress once
        faults = faults.kill(rank=rank, at_step=4)
    with pytest.raises(mh.RunFailed, match="killed by signal 9"):
        go(faults, "recovery.losses=3", workers=2)


def test_the_agent_itself_is_killed(tmp_path: Path, calm: Callable[..., str]) -> None:
    """Its workers die with it, the driver holds the memory, and another agent takes over."""
    from manyhands.launch.choose_engine import open_engine
    from manyhands.values.run_options import Where

    local = open_engine(Where())
    killed: list[int] = []

    def kill(event: events.Stepped) -> None:
        if event.step >= 4 and not killed:
            killed.append(local.agent.pid)  # type: ignore[attr-defined]
            os.kill(killed[0], signal.SIGKILL)

    try:
        report = mh.train(
            make("cnn"),
            to=tmp_path / "run",
            workers=2,
            settings=[*SETTINGS, "train.steps=200"],
            quiet=True,
            launcher=local,
            on_step=kill,
        )
    finally:
        local.close()
    assert killed and report.recoveries >= 1
    assert report.fingerprint == calm("train.steps=200")


def test_the_agent_is_killed_before_it_has_read_its_orders(tmp_path: Path) -> None:
    """Then its end looks like a broken connection."""
    local = Local("manyhands.worker.lifecycle:main", create_segments())
    agent = local.agent.pid
    try:
        os.kill(agent, signal.SIGSTOP)
        local.start(0, lambda place: b"", tmp_path / "log")
        os.kill(agent, signal.SIGKILL)
        while not (signs := local.poll()):
            pass
        assert [sign.worker for sign in signs if isinstance(sign, WorkerExit)] == [0]
        assert local.agent.pid != agent and local.agent.poll() is None
    finally:
        local.close()
