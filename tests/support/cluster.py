"""A run on several hosts (network namespaces), and what can be done to it.

`Cluster` uses commands only, as people do. `Warm` keeps daemons from one run to the next, with the
driver in a thread of this process: the same code, without waiting for torch each time.
"""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import manyhands as mh
from manyhands.accounting.ledger import read
from manyhands.accounting.proof import check
from manyhands.driver.live.command_socket import StopRun, ask
from manyhands.launch.engines.launcher import WORKER
from manyhands.launch.engines.local_processes import AGENT
from manyhands.launch.engines.memory_segments import create_segments
from manyhands.launch.hosts import joined_hosts, many_hosts
from manyhands.testing.namespaces import Host, Network
from manyhands.values.errors import Interrupted, RequestError
from manyhands.values.join_token import key_for
from manyhands.values.planned_faults import FaultPlan
from manyhands.values.run_folder import RunDir
from manyhands.values.task import Task
from tests.support.tasks import make

PORT = 7077
PATIENCE_S = 90.0
MANYHANDS = (sys.executable, "-m", "manyhands")

Event = dict[str, Any]


class Watched:
    """A run, as its folder tells of it."""

    def __init__(self, run: Path, alive: Callable[[], bool], said: Callable[[], str]) -> None:
        self.path, self.alive, self.said = run, alive, said
        self.seen = 0
        """Events that were waited for; the next is waited for among those that follow."""

    def events(self, kind: str = "") -> list[Event]:
        path = self.path / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        told = [json.loads(line) for line in lines if line.endswith("}")]
        return [e for e in told if kind in ("", e["event"])]

    def wait_for(self, what: Callable[[Event], bool]) -> Event:
        """The next event like this."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            alive = self.alive()
            for number, event in enumerate(self.events()):
                if number >= self.seen and what(event):
                    self.seen = number + 1
                    return event
            assert alive, f"it ended before that: {self.said()}"
            assert time.monotonic() < deadline, f"it did not come to that: {self.said()}"
            time.sleep(0.01)

    def step(self, number: int = 0) -> int:
        """The next step that is told of, after so many."""
        return self.wait_for(lambda e: e["event"] == "Stepped" and e["step"] >= number)["step"]

    def view_of(self, *sizes: int, without: Sequence[int] = ()) -> list[int]:
        """The next view of so many workers: their processes, by rank. After a death: `without` the
        dead. Whoever replaces them may be in the first view that follows, or in a later one."""

        def fits(event: Event) -> bool:
            if event["event"] != "Viewed":
                return False
            members = event["members"].values()
            return len(members) in sizes and not set(without) & set(members)

        return list(self.wait_for(fits)["members"].values())

    def hosted(self, name: str, what: str) -> None:
        """A host has come or gone."""
        self.wait_for(
            lambda e: e["event"] == "Hosted" and e["host"].startswith(name) and what in e["what"]
        )

    def now(self) -> None:
        """What has been told until now is not waited for."""
        self.seen = len(self.events())

    def proven(self) -> None:
        proof = check(read(RunDir(self.path).ledger))
        assert proof.ok, proof.problems


class Porters:
    """Of the hosts of a network, as `manyhands worker` starts them."""

    def __init__(self, net: Network, folder: Path) -> None:
        self.net, self.folder, self.token = net, folder, folder / "token"
        self.key = key_for(self.token)
        self.of: dict[Host, subprocess.Popen[bytes]] = {}
        self.count = 0
        (folder / "runs").mkdir()

    def start(
        self, host: Host, slots: int = 1, *arguments: str, port: int = PORT, blind: bool = False
    ) -> str:
        """Its name. `blind`: it does not see the folder in which the runs are."""
        self.count += 1
        name = f"{host.name}{self.count}"
        command = [*MANYHANDS, "worker", "--join", f"{self.net.hosts[0].address}:{port}"]
        command += ["--token-file", str(self.token), "--name", name, "--slots", str(slots)]
        command += arguments
        if blind:
            hidden = f"mount -t tmpfs none {self.folder / 'runs'}; exec {shlex.join(command)}"
            command = ["unshare", "-m", "sh", "-c", hidden]
        self.of[host] = self.command(host, command, name)
        return name

    def command(self, host: Host, command: Sequence[str], name: str) -> "subprocess.Popen[bytes]":
        scratch = self.folder / f"tmp-{name}"
        scratch.mkdir(exist_ok=True)
        with (self.folder / f"{name}.txt").open("ab") as out:
            return host.popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, "TMPDIR": str(scratch)},
            )

    def said(self) -> str:
        texts = [f"--- {p.name}\n{p.read_text()[-3000:]}" for p in self.folder.glob("*.txt")]
        logs = sorted(self.folder.glob("runs/*/logs/*.log"))
        texts += [f"--- {p.name}\n{p.read_text()[-1000:]}" for p in logs]
        return "\n".join(texts)

    def agent(self, host: Host) -> int:
        """The process from which a daemon's workers are forked."""
        (found,) = children(self.of[host].pid)
        return found

    def kill(self, host: Host) -> None:
        """With all that is on it; who is killed cannot tidy up."""
        host.kill()
        del self.of[host]
        for path in self.folder.glob(f"tmp-{host.name}*"):
            shutil.rmtree(path)

    def ended(self, *hosts: Host) -> None:
        """They go by themselves, and with them everything on their hosts; no folder is left."""
        for host in hosts or tuple(self.of):
            try:
                self.of[host].wait(30)
            except subprocess.TimeoutExpired:
                raise AssertionError(f"the daemon of {host.name} stays: {self.said()}") from None
            del self.of[host]
            empty(host)
        left = [path for path in self.folder.glob("tmp-*/manyhands-*") if path.exists()]
        assert not left, f"folders are left behind: {left}"


class Cluster(Porters):
    """The driver on the first host, by command."""

    def __init__(self, net: Network, folder: Path) -> None:
        super().__init__(net, folder)
        self.run = folder / "runs" / "run"
        self.driver: subprocess.Popen[bytes] | None = None

    def train(self, task: Path, *arguments: str) -> Watched:
        return self.drive("train", str(task), "--to", str(self.run), *arguments)

    def resume(self, *arguments: str) -> Watched:
        return self.drive("resume", str(self.run), *arguments)

    def drive(self, *command: str) -> Watched:
        at = self.net.hosts[0]
        listen = ["--listen", f"{at.address}:{PORT}", "--token-file", str(self.token)]
        driver = self.command(at, [*MANYHANDS, *command, *listen], "driver")
        self.driver = driver
        watched = Watched(self.run, lambda: driver.poll() is None, self.said)
        watched.now()
        return watched

    def finish(self, code: int = 0) -> Event:
        """Wait until the run is over; its report."""
        assert self.driver is not None
        try:
            ended = self.driver.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it does not end: {self.said()}") from None
        assert ended == code, self.said()
        report = self.run / "report.json"
        return json.loads(report.read_text()) if code == 0 else {}


class Warm(Porters):
    """Porters that stay, and runs one after the other."""

    def __init__(self, net: Network, folder: Path, here: int = 1, port: int = PORT) -> None:
        super().__init__(net, folder)
        at = net.hosts[0]
        self.port = port
        with at.inside():
            listening = joined_hosts.Listening([at.address], port, self.key, here)
            self.launcher = many_hosts.ManyHosts(WORKER, create_segments(), listening)
        self.slots: dict[Host, int] = {}
        self.runs = 0
        self.running: Running | None = None

    def need(self, slots: dict[Host, int], *, blind: bool = False) -> None:
        """These hosts are here, with so many slots each, and no others."""
        for host in [h for h in self.of if self.of[h].poll() is None and h not in slots]:
            self.of[host].terminate()
        for host, count in slots.items():
            daemon = self.of.get(host)
            if daemon is None or daemon.poll() is not None or self.slots[host] != count:
                self.leave(host)
                self.start(host, count, port=self.port, blind=blind)
                self.slots[host] = count
        deadline = time.monotonic() + PATIENCE_S
        wanted = sorted((host.name, count) for host, count in slots.items())
        while self.here() != wanted:
            assert time.monotonic() < deadline, f"{self.here()} are here: {self.said()}"
            self.launcher.poll()
            time.sleep(0.02)

    def here(self) -> list[tuple[str, int]]:
        guests = [host.guest.here for host in self.launcher.hosts.others.values()]
        return sorted((guest.name.rstrip("0123456789"), guest.slots) for guest in guests)

    def leave(self, host: Host) -> None:
        """Nothing of ours is on that host any more."""
        if (daemon := self.of.get(host)) is not None:
            daemon.terminate()
            daemon.wait(30)
            del self.of[host]
        empty(host)

    def train(
        self,
        task: Task | str,
        *settings: str,
        pause_s: float,
        workers: int | str | None,
        faults: FaultPlan | None = None,
    ) -> "Running":
        """Slowly: every micro-batch takes a pause, until it is told to `finish`."""
        self.runs += 1
        path = self.folder / "runs" / f"run-{self.runs}"
        slow = path.with_suffix(".slow")
        slow.touch()
        paced = paused(make(task) if isinstance(task, str) else task, slow, pause_s)
        self.running = Running(self, path, slow, paced, settings, workers, faults)
        return self.running

    def close(self) -> None:
        if self.running is not None:
            self.running.stop()
        self.launcher.close()
        for daemon in self.of.values():
            daemon.wait(30)


class Running(Watched):
    """A run whose driver is a thread on the first host. It is slow as long as `slow` is there."""

    def __init__(
        self,
        warm: Warm,
        run: Path,
        slow: Path,
        task: Task,
        settings: Sequence[str],
        workers: int | str | None,
        faults: FaultPlan | None = None,
    ) -> None:
        super().__init__(run, lambda: self.thread.is_alive(), warm.said)
        self.warm, self.slow, self.task, self.faults = warm, slow, task, faults
        self.settings, self.workers = settings, workers
        self.report: mh.Report | None = None
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._drive, name="driver", daemon=True)
        self.thread.start()

    def _drive(self) -> None:
        try:
            with self.warm.net.hosts[0].inside():
                self.report = mh.train(
                    self.task,
                    to=self.path,
                    workers=self.workers,
                    settings=[*self.settings, "log.every_steps=1"],
                    quiet=True,
                    launcher=self.warm.launcher,
                    faults=self.faults,
                )
        except (Exception, Interrupted) as error:
            self.error = error

    def finish(self) -> str:
        """Its fingerprint; nothing was lost or repeated."""
        self.slow.unlink()
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive(), f"it does not end: {self.said()}"
        assert self.report is not None, f"{self.error}\n{self.said()}"
        self.proven()
        return self.report.fingerprint

    @property
    def recoveries(self) -> int:
        assert self.report is not None
        return self.report.recoveries

    def stop(self) -> None:
        self.slow.unlink(missing_ok=True)
        with suppress(RequestError):
            ask(RunDir(self.path).control, StopRun(), patience_s=5)
        self.thread.join(PATIENCE_S)


def paused(task: Task, while_there: Path, pause_s: float) -> Task:
    """The same training, slowly, for as long as that file is there."""
    name = "loss" if task.embed is None else "embed"
    inner = getattr(task, name)
    assert callable(inner)

    def slowly(model: Any, batch: Any) -> Any:
        if while_there.exists():
            time.sleep(pause_s)
        return inner(model, batch)

    return replace(task, **{name: slowly})


# ---- processes


def children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def on(host: Host, pids: Sequence[int]) -> list[int]:
    """Which of these processes are on that host."""
    there = set(host.pids())
    return [pid for pid in pids if pid in there]


def kill(*pids: int, how: signal.Signals = signal.SIGKILL) -> None:
    for pid in pids:
        os.kill(pid, how)


def workers_of(pids: Sequence[int]) -> list[int]:
    """Those that are workers: forked from an agent."""
    return [pid for pid in pids if any(AGENT in line for line in parents(pid))]


def parents(pid: int) -> Iterator[str]:
    with suppress(OSError, IndexError):
        parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
        yield name_of(int(parent))


def empty(host: Host) -> None:
    """Everything on it ends, soon."""
    deadline = time.monotonic() + 10
    while left := host.pids():
        assert time.monotonic() < deadline, f"left behind: {[name_of(pid) for pid in left]}"
        time.sleep(0.02)


def name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return str(pid)
