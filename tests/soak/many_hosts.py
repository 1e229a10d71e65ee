# SPDX-License-Identifier: Apache-2.0
"""Runs on several hosts that are disturbed at random: `make soak-hosts SECONDS=600`.

As tests/soak/one_host.py, on hosts made of network namespaces. Workers, agents, daemons and whole
hosts are killed and stopped, links are cut for a while (both ways, one way, between two hosts of
workers), hosts are told to go, and come. The fingerprint must be that of one calm worker.
"""

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from manyhands.launch.choose_engine import open_engine
from manyhands.launch.engines.launcher import Launcher
from manyhands.stories.train import train
from manyhands.testing.namespaces import Host, Network, why_not
from manyhands.values.run_options import Where
from tests.soak.one_host import Round, choose
from tests.support.cluster import Running, Warm, workers_of

HOSTS = 4
MOST_DISTURBED_S = 12.0


class Disturber:
    """Does harm to hosts, one thing after the other; what it cut is whole again in the end."""

    def __init__(self, warm: Warm, seed: int) -> None:
        self.warm, self.net, self.dice = warm, warm.net, random.Random(seed + 2)
        self.did: list[str] = []
        self.later: list[tuple[float, Callable[[], None]]] = []
        """What is undone, and when."""

    def disturb(self, run: Running, seconds: float, mean_wait_s: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and run.alive():
            time.sleep(self.dice.expovariate(1 / mean_wait_s))
            self.undo(time.monotonic())
            what = self.dice.choice(WAYS)
            self.did.append(what.__name__)
            what(self)
        self.undo(float("inf"))

    def undo(self, now: float) -> None:
        for item in [item for item in self.later if item[0] <= now]:
            self.later.remove(item)
            item[1]()

    def in_a_while(self, undo: Callable[[], None]) -> None:
        self.later.append((time.monotonic() + self.dice.choice([0.3, 0.8, 1.7, 3.0, 5.0]), undo))

    def guest(self) -> Host:
        return self.dice.choice(self.net.hosts[1:])

    def kill_worker(self) -> None:
        self._signal(signal.SIGKILL)

    def stop_worker(self) -> None:
        self._signal(signal.SIGSTOP)

    def tell_worker_to_go(self) -> None:
        self._signal(signal.SIGTERM)

    def _signal(self, number: signal.Signals) -> None:
        host = self.dice.choice(self.net.hosts)
        if workers := workers_of(host.pids()):
            with suppress(ProcessLookupError):
                os.kill(self.dice.choice(workers), number)

    def kill_agent(self) -> None:
        host = self.guest()
        with suppress(OSError, ValueError, KeyError):
            os.kill(self.warm.agent(host), signal.SIGKILL)

    def kill_daemon(self) -> None:
        if (daemon := self.warm.of.get(host := self.guest())) is not None:
            daemon.kill()
            self.in_a_while(lambda: self.back(host))

    def stop_daemon(self) -> None:
        if (daemon := self.warm.of.get(self.guest())) is not None:
            daemon.send_signal(signal.SIGSTOP)
            self.in_a_while(lambda: daemon.send_signal(signal.SIGCONT))

    def kill_host(self) -> None:
        host = self.guest()
        host.kill()
        self.in_a_while(lambda: self.back(host))

    def tell_host_to_go(self) -> None:
        if (daemon := self.warm.of.get(host := self.guest())) is not None:
            daemon.terminate()
            self.in_a_while(lambda: self.back(host))

    def back(self, host: Host) -> None:
        """A new daemon, if there is none."""
        if (daemon := self.warm.of.get(host)) is None or daemon.poll() is not None:
            slots = self.warm.slots[host] = self.dice.choice([1, 2])
            self.warm.start(host, slots, port=self.warm.port)

    def isolate(self) -> None:
        host = self.dice.choice(self.net.hosts)
        self.net.isolate(host)
        self.in_a_while(lambda: self.net.rejoin(host))

    def cut(self) -> None:
        one, other = self.dice.sample(self.net.hosts, 2)
        self.net.cut(one, other, one_way=self.dice.random() < 0.4)
        self.in_a_while(lambda: self.net.heal(one, other))


WAYS = (
    Disturber.kill_worker,
    Disturber.kill_worker,
    Disturber.stop_worker,
    Disturber.tell_worker_to_go,
    Disturber.kill_agent,
    Disturber.kill_daemon,
    Disturber.stop_daemon,
    Disturber.kill_host,
    Disturber.tell_host_to_go,
    Disturber.isolate,
    Disturber.cut,
)


def run_round(chosen: Round, local: Launcher, warm: Warm) -> tuple[list[str], int, list[str]]:
    """What was done to it, how often it recovered, and which promises were broken."""
    dice = random.Random(chosen.seed + 3)
    settings = [s for s in chosen.settings if "gloo" not in s]
    folder = Path(tempfile.mkdtemp(dir=warm.folder))
    calm = train(
        chosen.task, to=folder / "calm", workers=1, settings=settings, quiet=True, launcher=local
    )
    for host in warm.net.hosts[1:]:
        warm.net.rejoin(host)
        if host.name not in [name for name, _ in warm.here()]:  # it rests, or is not there
            host.kill()
            warm.of.pop(host, None)
    warm.need({host: warm.slots.get(host, dice.choice([1, 2])) for host in warm.net.hosts[1:]})
    run = warm.train(chosen.task, *settings, pause_s=dice.choice([0.01, 0.04]), workers="1:8")
    run.step()
    disturber = Disturber(warm, chosen.seed)
    disturber.disturb(run, MOST_DISTURBED_S, dice.choice([0.3, 1.0, 2.5]))
    problems: list[str] = []
    recoveries = 0
    try:
        if run.finish() != calm.fingerprint:
            problems.append("the weights are not the calm run's")
        recoveries = run.recoveries
        assert run.report is not None
        if run.report.scores != calm.scores:
            problems.append("the scores are not the calm run's")
    except AssertionError as error:
        problems.append(str(error)[:3000])
    left = [p.name for p in (run.path / "checkpoints").iterdir() if p.name.startswith(".")]
    if left:
        problems.append(f"left behind: {left}")
    if not problems:
        shutil.rmtree(folder)
        shutil.rmtree(run.path)
    return disturber.did, recoveries, problems


def soak(seconds: float, first_seed: int, *, rounds: int | None = None) -> int:
    """Round after round; returns how many failed."""
    failed = count = 0
    folder = Path(tempfile.mkdtemp(prefix="manyhands-soak-"))
    local, deadline = open_engine(Where()), time.monotonic() + seconds
    with Network(hosts=HOSTS) as net:
        warm = Warm(net, folder)
        try:
            while time.monotonic() < deadline and (rounds is None or count < rounds):
                chosen, started = choose(first_seed + count), time.monotonic()
                count += 1
                did, recoveries, problems = run_round(chosen, local, warm)
                took = time.monotonic() - started
                print(
                    f"seed {chosen.seed}: {len(did)} disturbances, {recoveries} recoveries, "
                    f"{took:.1f} s",
                    flush=True,
                )
                if problems:
                    failed += 1
                    said = "\n".join(problems)
                    print(f"FAILED: {said}\n  {chosen.name}\n  {folder}\n  {did}", flush=True)
                    if warm.running is not None and warm.running.thread.is_alive():
                        break
        finally:
            warm.close()
            local.close()
    print(f"{count} rounds, {failed} failed")
    if not failed:
        shutil.rmtree(folder)
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=None, help="of the first round")
    parser.add_argument("--rounds", type=int, default=None)
    given = parser.parse_args()
    if reason := why_not():
        sys.exit(reason)
    seed = given.seed if given.seed is not None else random.SystemRandom().randrange(10**6)
    print(f"first seed {seed}", flush=True)
    sys.exit(1 if soak(given.seconds, seed, rounds=given.rounds) else 0)


if __name__ == "__main__":
    main()
