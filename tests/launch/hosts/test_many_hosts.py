"""Runs on several hosts: whatever happens to hosts, links and processes, the weights are those of
one undisturbed worker, and nothing is left behind."""

import ctypes
import json
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import manyhands as mh
from manyhands.launch.engines.launcher import Launcher
from manyhands.testing.namespaces import Host, Network, why_not
from tests.support.cluster import (
    MANYHANDS,
    PATIENCE_S,
    Cluster,
    Running,
    Warm,
    empty,
    kill,
    on,
    workers_of,
)
from tests.support.tasks import images, make

SETTINGS = ("train.batch=32", "train.micro_batch=4", "train.steps=120", "recovery.silent_s=1")
LEASE_S = 2.0

Calm = Callable[..., str]
Go = Callable[..., Running]


@pytest.fixture(scope="module")
def calm(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Calm:
    """The fingerprint of one undisturbed worker, on one host."""
    known: dict[tuple[str, ...], str] = {}

    def fingerprint(kind: str, *settings: str) -> str:
        if (kind, *settings) not in known:
            report = mh.train(
                make(kind),
                to=tmp_path_factory.mktemp("calm") / "run",
                workers=1,
                settings=[*SETTINGS, *settings],
                quiet=True,
                launcher=launcher,
            )
            known[kind, *settings] = report.fingerprint
        return known[kind, *settings]

    return fingerprint


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    """Hosts a (the driver's, with one worker), b, c and d."""
    if reason := why_not():
        pytest.skip(reason)
    with Network(hosts=4) as net:
        made = Warm(net, tmp_path_factory.mktemp("hosts"))
        yield made
        made.close()
        for host in net.hosts:
            empty(host)


@pytest.fixture
def hosts(warm: Warm) -> Iterator[tuple[Host, Host, Host, Host]]:
    a, b, c, d = warm.net.hosts
    yield a, b, c, d
    if warm.running is not None:
        warm.running.stop()
    for host in warm.net.hosts:
        warm.net.rejoin(host)


@pytest.fixture
def go(warm: Warm, hosts: tuple[Host, ...]) -> Go:
    def train(
        slots: dict[Host, int],
        kind: str = "cnn",
        *settings: str,
        pause_s: float = 0.05,
        workers: int | str | None = "1:8",
    ) -> Running:
        """A run that has begun on all hosts, each with so many workers."""
        warm.need(slots)
        run = warm.train(kind, *SETTINGS, *settings, pause_s=pause_s, workers=workers)
        run.view_of(1 + sum(slots.values()))
        run.step()
        return run

    return train


def members(run: Running) -> list[int]:
    """Processes of the newest view, by rank."""
    return list(run.events("Viewed")[-1]["members"].values())


# ---- processes die


@pytest.mark.parametrize(
    ("kind", "which"),
    [
        ("cnn", "another"),
        pytest.param("odd", "first", marks=pytest.mark.slow),
        pytest.param("own", "here", marks=pytest.mark.slow),
        ("lstm", "all of it"),
        ("towers", "first"),
        ("rows", "all of it"),
    ],
)
def test_a_killed_worker(
    go: Go, calm: Calm, hosts: tuple[Host, ...], kind: str, which: str
) -> None:
    """On another host; the one that speaks for it; on the driver's; all workers of a host."""
    a, b, c, _ = hosts
    run = go({b: 2, c: 1}, kind)
    victims = {"another": on(c, members(run)), "here": on(a, members(run))}
    there = on(b, members(run))
    victims |= {"first": there[:1], "all of it": there}
    kill(*victims[which])
    run.view_of(4, without=victims[which])
    run.step()
    assert run.finish() == calm(kind)
    assert run.recoveries == 1


def test_a_worker_that_hangs_on_another_host(go: Go, calm: Calm, hosts: tuple[Host, ...]) -> None:
    _, b, c, _ = hosts
    run = go({b: 2, c: 1}, "odd")
    victim = on(b, members(run))[0]
    kill(victim, how=signal.SIGSTOP)
    assert "has not been heard of" in run.wait_for(lambda e: e["event"] == "Lost")["what"]
    run.view_of(4, without=[victim])
    assert run.finish() == calm("odd")
    assert run.recoveries == 1


@pytest.mark.slow
def test_readers_are_where_their_workers_are(go: Go, calm: Calm, hosts: tuple[Host, ...]) -> None:
    """One is killed on each host, and then a worker."""
    a, b, _, _ = hosts
    run = go({b: 2}, "augmented", "data.readers=1")
    run.now()
    nurseries = [child for worker in members(run) for child in children_of(worker)]
    readers = [child for nursery in nurseries for child in children_of(nursery)]
    assert len(on(a, readers)) == 1 and len(on(b, readers)) == 2
    kill(on(a, readers)[0], on(b, readers)[0])
    run.step()
    victim = on(b, members(run))[0]
    kill(victim)
    run.view_of(3, without=[victim])
    assert run.finish() == calm("augmented")


def children_of(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.slow
def test_a_killed_daemon(go: Go, calm: Calm, warm: Warm, hosts: tuple[Host, ...]) -> None:
    """All on its host die with it. Another can be started there, and takes part."""
    _, b, c, _ = hosts
    run = go({b: 2, c: 1}, "cnn")
    run.now()
    kill(warm.of[b].pid)
    run.view_of(2)
    empty(b)
    warm.of[b].wait()
    warm.start(b, 2)
    run.view_of(4)
    assert run.finish() == calm("cnn")
    assert run.recoveries == 1


@pytest.mark.slow
def test_a_killed_agent(go: Go, calm: Calm, warm: Warm, hosts: tuple[Host, ...]) -> None:
    """Its workers die with it; the memory of the host does not, and another takes its place."""
    _, b, c, _ = hosts
    run = go({b: 2, c: 1}, "own")
    gone = on(b, members(run))
    kill(warm.agent(b))
    run.view_of(4, without=gone)
    assert run.finish() == calm("own")
    assert run.recoveries == 1


def test_a_host_dies_as_a_whole(go: Go, calm: Calm, hosts: tuple[Host, ...]) -> None:
    _, b, c, _ = hosts
    run = go({b: 2, c: 1}, "lstm", "train.encrypt=true")
    run.now()
    b.kill()
    run.view_of(2)
    run.step()
    assert run.finish() == calm("lstm")
    (lost,) = run.events("Lost")
    assert len(lost["ranks"]) == 2, "both that were there"
    verdict = json.loads((run.path / "verdict.json").read_text())
    assert verdict["host"].startswith("b") and verdict["ranks"] == lost["ranks"]
    assert verdict["decided"].startswith(f"host {verdict['host']} is gone with ranks ")


@pytest.mark.parametrize("kind", ["cnn", "rows"])
def test_servers_on_several_hosts(go: Go, calm: Calm, hosts: tuple[Host, ...], kind: str) -> None:
    """Two of four processes serve; one is killed, then a host dies as a whole."""
    _, b, c, _ = hosts
    run = go({b: 2, c: 1}, kind, "server.count=2")
    serving = run.events("Viewed")[-1]["servers"]
    assert len(serving) == 2
    server = members(run)[serving[-1]]
    kill(server)
    run.view_of(4, without=[server])
    run.step()
    run.now()
    b.kill()
    run.view_of(2)
    run.step()
    assert run.finish() == calm(kind)


# ---- links are cut


def test_a_short_cut_is_waited_out(go: Go, calm: Calm, warm: Warm, hosts: tuple[Host, ...]) -> None:
    _, b, c, _ = hosts
    run = go({b: 1, c: 1}, "cnn", "recovery.silent_s=3")
    warm.net.isolate(b)
    time.sleep(0.8)
    warm.net.rejoin(b)
    run.now()
    run.step(run.step() + 10)
    assert run.finish() == calm("cnn")
    assert run.recoveries == 0


@pytest.mark.parametrize(
    "how",
    ["to it", *(pytest.param(how, marks=pytest.mark.slow) for how in ("both ways", "from it"))],
)
def test_a_cut_link(go: Go, calm: Calm, warm: Warm, hosts: tuple[Host, ...], how: str) -> None:
    """For good, between the driver and a host; one way is as bad as both."""
    a, b, c, _ = hosts
    run = go({b: 1, c: 1}, "cnn")
    run.now()
    if how == "from it":
        warm.net.cut(b, a, one_way=True)
    else:
        warm.net.cut(a, b, one_way=how == "to it")
    run.view_of(2)
    run.step()
    assert run.finish() == calm("cnn")
    assert run.recoveries == 1


@pytest.mark.parametrize("slots", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_two_hosts_do_not_reach_each_other(
    go: Go, calm: Calm, warm: Warm, hosts: tuple[Host, ...], slots: int
) -> None:
    """The driver reaches both, and goes on with one of them."""
    _, b, c, _ = hosts
    run = go({b: slots, c: slots}, "odd")
    run.now()
    warm.net.cut(b, c)
    run.view_of(1 + slots)
    run.step()
    assert run.finish() == calm("odd")
    gone = [e["what"] for e in run.events("Hosted") if "do not reach each other" in e["what"]]
    assert len(gone) == 1
    for host in (b, c):  # the one that went rests for a while
        warm.leave(host)


@pytest.mark.slow
def test_all_hosts_but_one_are_cut_off(
    go: Go, calm: Calm, warm: Warm, hosts: tuple[Host, ...]
) -> None:
    a, b, c, d = hosts
    run = go({b: 1, c: 1, d: 1}, "lstm")
    run.now()
    for host in (b, c, d):
        warm.net.isolate(host)
    assert on(a, run.view_of(1))
    run.step()
    assert run.finish() == calm("lstm")


@pytest.mark.slow
def test_the_drivers_host_is_cut_off_for_a_while(
    go: Go, calm: Calm, warm: Warm, hosts: tuple[Host, ...]
) -> None:
    """It goes on alone, the others stop; then they are its guests again."""
    a, b, c, _ = hosts
    run = go({b: 2, c: 1}, "odd", pause_s=0.1)
    run.now()
    warm.net.isolate(a)
    assert on(a, run.view_of(1))
    run.step()
    for host in (b, c):
        no_workers_on(host)
    warm.net.rejoin(a)
    run.view_of(4)
    assert run.finish() == calm("odd")


@pytest.mark.slow
def test_a_host_comes_back_as_somebody_new(
    go: Go, calm: Calm, warm: Warm, hosts: tuple[Host, ...]
) -> None:
    """Whoever trained there has been stopped before: nobody goes on alone."""
    _, b, c, _ = hosts
    run = go({b: 2, c: 1}, "cnn", pause_s=0.1)
    run.now()
    before = on(b, members(run))
    warm.net.isolate(b)
    run.view_of(2)
    no_workers_on(b)
    for _ in range(10):
        assert not workers_of(b.pids()), "it trains, and nobody knows"
        time.sleep(0.1)
    warm.net.rejoin(b)
    after = on(b, run.view_of(4))
    assert len(after) == 2 and not set(after) & set(before)
    assert run.finish() == calm("cnn")


def no_workers_on(host: Host) -> None:
    """Within a lease, and a little."""
    deadline = time.monotonic() + LEASE_S + 2
    while workers_of(host.pids()):
        assert time.monotonic() < deadline, f"workers on {host.name} go on"
        time.sleep(0.02)


# ---- hosts come and go


def test_a_host_joins_half_way(go: Go, calm: Calm, warm: Warm, hosts: tuple[Host, ...]) -> None:
    """Nobody has said how many workers there should be."""
    _, b, _, d = hosts
    warm.leave(d)
    run = go({b: 1}, "own", workers=None)
    run.step(5)
    warm.start(d, 2)
    pids = run.view_of(4)
    assert len(on(d, pids)) == 2
    assert run.events("Viewed")[-1]["first_step"] >= 5
    assert run.finish() == calm("own")
    assert run.recoveries == 0


def test_a_host_is_told_to_go(go: Go, calm: Calm, warm: Warm, hosts: tuple[Host, ...]) -> None:
    a, b, c, _ = hosts
    run = go({b: 2, c: 1}, "odd")
    run.now()
    warm.of[b].terminate()
    pids = run.view_of(2)
    assert on(a, pids) and on(c, pids)
    warm.ended(b)
    assert run.finish() == calm("odd")
    assert run.recoveries == 0 and not run.events("Lost"), "nothing was computed in vain"


# ---- by command


@pytest.fixture
def cold(tmp_path: Path, network: Callable[..., Network]) -> Cluster:
    return Cluster(network(hosts=3), tmp_path)


@pytest.fixture
def task(tmp_path: Path) -> Path:
    """A file that defines a task. Its training is slow as long as `slow` is there."""
    file, slow = tmp_path / "task.py", tmp_path / "slow"
    slow.touch()
    file.write_text(
        "from pathlib import Path\n"
        "from tests.support.cluster import paused\n"
        "from tests.support.tasks import make\n"
        f"task = paused(make('cnn'), Path({str(slow)!r}), 0.05)\n"
    )
    return file


def told(*settings: str) -> list[str]:
    every = (*SETTINGS, *settings, "log.every_steps=1")
    return [word for setting in every for word in ("--set", setting)]


def test_two_hosts_with_two_workers_each(cold: Cluster, calm: Calm, task: Path) -> None:
    a, b, _ = cold.net.hosts
    cold.start(b, 2)
    run = cold.train(task, "--hosts", "here:2", "--workers", "1:4", *told("train.encrypt=true"))
    run.view_of(4)
    task.with_name("slow").unlink()
    assert cold.finish()["fingerprint"] == calm("cnn")
    checked = [*MANYHANDS, "ledger", str(cold.run), "--check"]
    subprocess.run(checked, check=True, stdout=subprocess.DEVNULL)
    cold.ended()
    empty(a)
    assert {path.name for path in cold.run.glob(".*")} <= {".lock"}


@pytest.mark.slow
def test_the_driver_is_killed(cold: Cluster, calm: Calm, task: Path) -> None:
    """Nobody trains on; daemons look for it for a while, and go. Then it is resumed elsewhere."""
    a, b, c = cold.net.hosts
    cold.start(b, 2, "--patience", "2")
    run = cold.train(task, "--workers", "1:4", *told("checkpoint.every_steps=5"))
    run.wait_for(lambda e: e["event"] == "Saved")
    assert cold.driver is not None
    cold.driver.kill()
    cold.driver.wait()
    empty(a)
    no_workers_on(b)
    assert cold.of[b].wait(30) == 1
    cold.ended()
    task.with_name("slow").unlink()
    cold.start(c, 1)
    cold.resume("--workers", "1:4")
    assert cold.finish()["fingerprint"] == calm("cnn")
    run.proven()
    cold.ended()
    empty(a)


@pytest.mark.slow
def test_a_run_is_stopped_and_resumed_on_other_hosts(cold: Cluster, calm: Calm, task: Path) -> None:
    a, b, c = cold.net.hosts
    cold.start(b, 2)
    run = cold.train(task, "--workers", "1:4", *told())
    run.view_of(3, 4)
    run.step()
    assert cold.driver is not None
    cold.driver.send_signal(signal.SIGINT)
    cold.finish(code=130)
    cold.ended()
    empty(a)
    task.with_name("slow").unlink()
    cold.start(c, 2)
    run = cold.resume("--workers", "1:4")
    assert cold.finish()["fingerprint"] == calm("cnn")
    run.proven()
    cold.ended()
    empty(a)


@pytest.mark.slow
def test_the_driver_is_stopped_for_a_while(cold: Cluster, calm: Calm, task: Path) -> None:
    """As when a laptop sleeps: its guests leave, and come back."""
    _, b, _ = cold.net.hosts
    cold.start(b, 1)
    run = cold.train(task, "--hosts", "here:1", "--workers", "1:2", *told())
    run.view_of(2)
    run.step()
    assert cold.driver is not None
    cold.driver.send_signal(signal.SIGSTOP)
    no_workers_on(b)
    run.now()
    cold.driver.send_signal(signal.SIGCONT)
    run.view_of(2)
    task.with_name("slow").unlink()
    assert cold.finish()["fingerprint"] == calm("cnn")
    run.proven()
    cold.ended()


# ---- hosts that do not see the run's folder


@pytest.fixture
def blind(tmp_path: Path, network: Callable[..., Network]) -> Iterator[Warm]:
    """All workers are on hosts that do not see the run's folder."""
    made = Warm(network(hosts=3), tmp_path, here=0)
    yield made
    made.close()


def crashes(model: Any, batch: Any) -> Any:
    if 21 in batch["i"].tolist():
        ctypes.string_at(0)
    return model(batch["x"]).mean()


def reads(file: Path) -> Callable[[Any, Any], Any]:
    return lambda model, batch: model(batch["x"]).mean() * float(file.read_text())


def test_user_code_fails_on_a_host_that_does_not_see_the_folder(blind: Warm) -> None:
    """The verdict has the records and the line, the name of the host, and what to do about it."""
    _, b, _ = blind.net.hosts
    blind.need({b: 2}, blind=True)
    plain = replace(make("cnn"), data={**images(), "i": torch.arange(101)})
    settings = ("train.batch=32", "train.micro_batch=4", "train.steps=4")
    here = replace(plain, loss=reads(blind.folder / "there is no such file"))
    for task, expected in (
        (replace(plain, loss=crashes), ["SIGSEGV) at ", "test_many_hosts.py:", "in crashes"]),
        (here, ["FileNotFoundError", "That is how it is on host b", "--ship"]),
    ):
        run = blind.train(task, *settings, pause_s=0, workers=2)
        run.thread.join(PATIENCE_S)
        said = str(run.error)
        assert all(text in said for text in expected), said
        assert re.search(r" on b\d*;", said), said
        place = re.search(r"micro-batch \d+: records (.+)", said)
        assert place is not None
        assert task is here or "21" in place[1].split(", "), said


@pytest.mark.slow
def test_hosts_that_do_not_see_the_folder(blind: Warm, calm: Calm) -> None:
    """What they save and log is carried to the driver; when the only one that holds the state is
    gone, another begins with what was saved."""
    _, b, c = blind.net.hosts
    blind.need({b: 2}, blind=True)
    settings = (*SETTINGS, "checkpoint.every_steps=7")
    run = blind.train("odd", *settings, pause_s=0.05, workers="1:2")
    pids = run.view_of(2)
    run.wait_for(lambda e: e["event"] == "Saved")
    kill(pids[1], how=signal.SIGSTOP)  # its slot is not free before it is dead
    run.view_of(1)
    run.view_of(2)
    saved = run.wait_for(lambda e: e["event"] == "Saved")["step"]
    blind.start(c, 2, port=blind.port, blind=True)
    run.hosted("c", "joined")
    run.now()
    blind.kill(b)
    run.view_of(1, 2)
    assert saved <= run.events("Viewed")[-1]["first_step"]
    assert run.finish() == calm("odd", "checkpoint.every_steps=7")
    assert "view 1 is over" in (run.path / "logs" / "worker-00.log").read_text()
    blind.close()
    blind.ended(c)
