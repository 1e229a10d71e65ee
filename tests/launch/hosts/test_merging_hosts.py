"""Workers at different steps on several hosts: whoever dies, each step is applied exactly once, on
every host, and nothing that was acknowledged is lost."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import manyhands as mh
from manyhands.accounting.ledger import read
from manyhands.accounting.proof import check
from manyhands.checkpoint.step_files import MODEL
from manyhands.stories import live
from manyhands.testing.namespaces import Host, Network, why_not
from manyhands.training.sync.merge.history import (
    PushApplied,
    PushMade,
    PushSettled,
    ViewEntered,
    read_history,
    violations,
)
from manyhands.values.planned_faults import FaultPlan
from manyhands.values.run_folder import RunDir
from tests.support.cluster import Running, Warm, empty, kill, on
from tests.support.tasks import make

STEPS = 48
SETTINGS = ("train.batch=32", "train.micro_batch=8", f"train.steps={STEPS}", "recovery.silent_s=1")
ASYNC = ("train.sync=server", "server.mode=async")
STALE = ("train.sync=server", "server.mode=stale", "server.staleness=2")


class Visits(nn.Module):
    """Its weights say how often each record was applied: the gradient does not depend on them, and
    all numbers are exact. They travel between hosts in several pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = nn.Parameter(torch.zeros(400_000))


def visit(model: Any, batch: Any) -> Tensor:
    return -model.seen[batch["i"]].mean()


def visits() -> mh.Task:
    return mh.Task(
        model=Visits,
        loss=visit,
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=1.0),
        data={"i": torch.arange(128) * 3120},
    )


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    """All workers are on hosts b, c and d; the driver's, a, has none: any of them may die."""
    if reason := why_not():
        pytest.skip(reason)
    with Network(hosts=4) as net:
        made = Warm(net, tmp_path_factory.mktemp("hosts"), here=0)
        yield made
        made.close()
        for host in net.hosts:
            empty(host)


@pytest.fixture
def hosts(warm: Warm) -> Iterator[tuple[Host, Host, Host]]:
    _, b, c, d = warm.net.hosts
    yield b, c, d
    if warm.running is not None:
        warm.running.stop()


Go = Callable[..., Running]


@pytest.fixture
def go(warm: Warm, hosts: tuple[Host, ...], tmp_path: Path) -> Go:
    def train(
        slots: dict[Host, int],
        *settings: str,
        task: mh.Task | None = None,
        faults: FaultPlan | None = None,
        pause_s: float = 0.2,
    ) -> Running:
        """A run that has begun on all hosts, each with so many processes."""
        warm.need(slots)
        plan = (faults or FaultPlan()).recording(str(tmp_path))
        run = warm.train(
            task or visits(), *SETTINGS, *settings, pause_s=pause_s, workers="1:8", faults=plan
        )
        run.view_of(sum(slots.values()))
        run.step()
        return run

    return train


def finished(run: Running, history: Path, bound: int | None = None) -> mh.Report:
    """Each step was applied once, on all hosts, in the same order, with the same bits."""
    run.finish()
    report = run.report
    assert report is not None and report.step == STEPS
    assert check(read(RunDir(run.path).ledger)).steps == STEPS
    recorded = read_history(history)
    assert {type(e) for e in recorded} >= {PushMade, PushApplied, PushSettled, ViewEntered}
    assert violations(recorded, bound=bound, done=range(STEPS)) == []
    return report


def counted(run: Running, history: Path, bound: int | None = None) -> None:
    """In 4 steps every record adds 1/32 to its weight."""
    report = finished(run, history, bound)
    seen = load_file(RunDir(Path(report.run)).step(STEPS) / MODEL)["seen"]
    expected = torch.zeros(400_000)
    expected[torch.arange(128) * 3120] = STEPS / 4 / 32
    assert torch.equal(seen, expected)


def members(run: Running) -> list[int]:
    """Processes of the newest view, by rank."""
    return list(run.events("Viewed")[-1]["members"].values())


def head(run: Running, hosts: tuple[Host, ...]) -> Host:
    """Where the first member is, who orders what is pushed."""
    first = members(run)[0]
    return next(host for host in hosts if on(host, [first]))


def servers(run: Running) -> list[int]:
    pids = members(run)
    return [pids[rank] for rank in run.events("Viewed")[-1]["servers"]]


@pytest.mark.parametrize("mode", [ASYNC, STALE], ids=["async", "stale"])
def test_nobody_dies(go: Go, hosts: tuple[Host, ...], tmp_path: Path, mode: tuple[str]) -> None:
    b, c, d = hosts
    run = go({b: 2, c: 2, d: 1}, *mode, "train.encrypt=true")
    assert all(len(on(host, servers(run))) == 1 for host in hosts)
    counted(run, tmp_path, 2 if mode is STALE else None)
    assert run.recoveries == 0


def test_hosts_with_room_for_one_say_what_they_wait_for(
    warm: Warm, hosts: tuple[Host, ...], tmp_path: Path
) -> None:
    """And go on when there is one with room for two."""
    b, c, d = hosts
    warm.need({b: 1, c: 1})
    faults = FaultPlan().recording(str(tmp_path))
    run = warm.train(visits(), *SETTINGS, *ASYNC, pause_s=0.05, workers="1:8", faults=faults)
    told = run.wait_for(lambda e: e["event"] == "Warned" and "training waits" in e["text"])
    assert "2 hosts with room for 2 in all" in told["text"] and "--slots 2" in told["text"]
    assert not run.events("Viewed")
    warm.start(d, 2)
    run.view_of(4)
    counted(run, tmp_path)


@pytest.mark.parametrize("which", ["head", "server", "worker", "worker beside the head"])
def test_a_process_is_killed(go: Go, hosts: tuple[Host, ...], tmp_path: Path, which: str) -> None:
    b, c, _ = hosts
    run = go({b: 2, c: 2}, *ASYNC)
    pids, serving = members(run), servers(run)
    beside = on(head(run, hosts), pids)
    others = [pid for pid in pids if pid not in beside]
    victims = {"head": beside[0], "server": others[0], "worker": others[1]}
    assert [pids[0], others[0]] == serving
    victim = victims.get(which, beside[1])
    kill(victim)
    run.view_of(4, without=[victim])
    run.step()
    counted(run, tmp_path)
    assert run.recoveries == 1


MOMENTS = ("begin", "gather", "update", "share", "regroup")
USUAL = {(0, "update"), (1, "share"), (1, "gather"), (3, "gather")}


@pytest.mark.parametrize(
    ("worker", "at"),
    [
        pytest.param(n, at, marks=[] if (n, at) in USUAL else [pytest.mark.slow])
        for n in range(4)
        for at in MOMENTS
        if n < 2 or at != "update"
    ],
)
def test_at_every_moment(
    go: Go, hosts: tuple[Host, ...], tmp_path: Path, worker: int, at: str
) -> None:
    """Workers 0 and 1 serve, the first of them is the head."""
    b, c, _ = hosts
    faults = FaultPlan().kill(rank=worker, at_step=0 if at == "regroup" else 5, at=at)
    run = go({b: 2, c: 2}, *ASYNC, faults=faults)
    counted(run, tmp_path)
    assert run.recoveries == 1


@pytest.mark.parametrize("who", [(0, 1), (2, 3), (1, 2)])
def test_several_at_once(
    go: Go, hosts: tuple[Host, ...], tmp_path: Path, who: tuple[int, int]
) -> None:
    """All servers; all workers; one of each. And who mends dies too."""
    b, c, _ = hosts
    faults = FaultPlan().kill(rank=4, at_step=0, at="regroup")
    for worker in who:
        faults = faults.kill(rank=worker, at_step=5, at="gather")
    run = go({b: 2, c: 2}, *ASYNC, faults=faults)
    counted(run, tmp_path)


def test_whoever_did_not_finish_is_made_up_for(
    go: Go, hosts: tuple[Host, ...], tmp_path: Path
) -> None:
    """All steps are done, all others have left."""
    b, c, _ = hosts
    run = go({b: 2, c: 2}, *ASYNC, faults=FaultPlan().kill(rank=1, at_step=STEPS, at="save"))
    counted(run, tmp_path)
    assert run.recoveries == 1


@pytest.mark.parametrize("kind", ["cnn", "lstm"])
def test_all_hosts_have_the_same_bits(
    go: Go, hosts: tuple[Host, ...], tmp_path: Path, kind: str
) -> None:
    """Of weights, of what the optimizer keeps and of buffers: whenever a view begins, each having
    applied for itself what the others have."""
    b, c, d = hosts
    settings = ("train.clip_norm=0.5", "recovery.silent_s=3")
    run = go({b: 2, c: 2, d: 1}, *ASYNC, *settings, task=make(kind))
    for _ in range(2):
        at = run.step()
        worker = members(run)[1]
        kill(worker)
        run.view_of(5, without=[worker])
        run.step(at + 2)
    finished(run, tmp_path)
    began = [e for e in read_history(tmp_path) if isinstance(e, ViewEntered) and e.done > 0]
    assert len(began) >= 6 and len({e.digest for e in began}) > 1


def test_a_host_is_cut_off(go: Go, warm: Warm, hosts: tuple[Host, ...], tmp_path: Path) -> None:
    """For a short time: that is waited out. Then for good, with all that it alone may have."""
    b, c, _ = hosts
    run = go({b: 2, c: 2}, *ASYNC, "recovery.silent_s=3")
    first = head(run, hosts)
    other = next(host for host in (b, c) if host is not first)
    warm.net.isolate(other)
    time.sleep(0.8)
    warm.net.rejoin(other)
    run.now()
    run.step(run.step() + 2)
    assert len(run.events("Viewed")) == 1
    gone = on(other, members(run))
    warm.net.isolate(other)
    run.view_of(2, without=gone)
    run.step()
    counted(run, tmp_path)
    warm.net.rejoin(other)
    warm.leave(other)


def test_a_host_joins_is_saved_and_goes_on_in_another_way(
    go: Go, warm: Warm, hosts: tuple[Host, ...], tmp_path: Path
) -> None:
    """It takes everything from another. What is saved after n steps are the first n, wherever."""
    b, c, _ = hosts
    run = go({b: 2}, *ASYNC, "checkpoint.every_steps=8", pause_s=0.3)
    warm.start(c, 2)
    run.view_of(4)
    run.step()
    live.change(run.path, ["lr=1.0"], 60)
    warm.of[b].terminate()  # the head's, and all that trained from the beginning
    pids = run.view_of(2)
    assert len(on(c, pids)) == 2
    counted(run, tmp_path)
    saved = [e["step"] for e in run.events("Saved")]
    assert set(range(8, STEPS + 1, 8)) <= set(saved)
    for step in saved[-3:]:
        seen = load_file(RunDir(run.path).step(step) / MODEL)["seen"]
        assert float(seen.sum()) == step, "each step adds one, in 32 parts"
    with warm.net.hosts[0].inside():
        report = mh.resume(
            run.path,
            visits(),
            workers=1,
            sync="allreduce",
            settings=[f"train.steps={STEPS + 4}"],
            quiet=True,
            launcher=warm.launcher,
        )
    seen = load_file(RunDir(run.path).step(STEPS + 4) / MODEL)["seen"]
    assert report.step == STEPS + 4 and float(seen.sum()) == STEPS + 4


@pytest.mark.parametrize("which", ["head", "other"])
@pytest.mark.parametrize("mode", [ASYNC, STALE], ids=["async", "stale"])
def test_a_host_dies(
    go: Go, warm: Warm, hosts: tuple[Host, ...], tmp_path: Path, which: str, mode: tuple[str]
) -> None:
    """As a whole, with its memory."""
    b, c, d = hosts
    run = go({b: 2, c: 2, d: 2}, *mode)
    first = head(run, hosts)
    other = next(host for host in hosts if host is not first)
    victim = first if which == "head" else other
    gone = on(victim, members(run))
    warm.kill(victim)
    run.view_of(4, without=gone)
    run.step()
    counted(run, tmp_path, 2 if mode is STALE else None)
