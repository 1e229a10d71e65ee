# SPDX-License-Identifier: Apache-2.0
"""Several hosts, as network namespaces of this machine: speed, overlap, and losing hands.

    python benchmarks/hosts.py [--quick] [--only speed,overlap,recovery,encrypt] [--rounds 3]
        [--works mlp,gpt] [--json FILE]

speed: samples/s of the steady state beside bare DDP over gloo under torchrun, with as many hosts
and workers per host as the work's name says (mlp 2x1: two hosts with one worker each), over links
without a limit and of 1 Gbit/s. All share this machine's cores, so ratios count, not sizes. Ratios
are to the faster of ddp and ddp-fused.

overlap: the same training with and without sending gradients while backward goes on
(train.overlap), two hosts of one worker, one micro-batch each. `gain` is the time a step saves,
over the smaller of what is to overlap: backward of a micro-batch (timed by itself), and the
exchange (timed by itself, as a step of `Links` over the same link). Wanted: 0.8.

recovery: three hosts of one worker; seconds from the act to the next step that is done, as the
driver hears of it (heartbeats come every 0.25 s): kill -9 of a worker on another host, a host that
is cut off and killed whole, a link that is cut for ever. Default settings.

encrypt (only if asked for): samples/s with `train.encrypt` (manyhands) and without (plain), which
take turns within each round, the other first in every second one. Ratios are to plain; wanted:
0.95, the cost at which it could be on by itself.
"""

import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import clock
import rows
import torch
from rows import Metric, Wanted, console
from works import WORKS

from manyhands.testing.namespaces import Host, Network, why_not
from manyhands.values.join_token import key_for

HERE = Path(__file__).parent
PORT = 7077
METRICS = (
    Metric("samples_per_s", "samples/s"),
    Metric("gain", "gain", digits=2),
    Metric("seconds", "seconds", digits=2),
)
SHAPES = ((2, 1), (2, 2), (4, 1))
LINKS = {"": None, "1G": 1000.0}
STEPS = {"mlp": 300, "gpt": 16}
SECONDS = {"kill": 1.0, "host": 3.0, "cut": 3.0}


def name_of(work: str, shape: tuple[int, int], link: str) -> str:
    return f"{work} {shape[0]}x{shape[1]}{' ' * bool(link)}{link}"


TARGETS = {
    (name_of(work, shape, link), "samples_per_s"): Wanted("≥", 1.3 if shape[1] > 1 else 1.0)
    for work in STEPS
    for shape in SHAPES
    for link in LINKS
}
TARGETS.update({(what, "seconds"): Wanted("≤", s, of_ratio=False) for what, s in SECONDS.items()})
SLOW = {"1G": 1000.0, "500M": 500.0, "250M": 250.0}
STEPS_OF_OVERLAP = {"gpt": 16, "tower": 40}
TARGETS.update(
    {
        (f"{work} 2x1 {link}", "gain"): Wanted("≥", 0.8, of_ratio=False)
        for work in STEPS_OF_OVERLAP
        for link in SLOW
    }
)
SEALED = "sealed"
TARGETS.update(
    {
        (f"{name_of(work, shape, link)} {SEALED}", "samples_per_s"): Wanted("≥", 0.95)
        for work in STEPS
        for shape in SHAPES
        for link in LINKS
    }
)


# ---- speed


def ddp(net: Network, work: str, per_host: int, *flags: str) -> list[tuple[Host, list[str]]]:
    first = net.hosts[0].address
    script = [str(HERE / "ddp_contestant.py"), work, "--to", os.devnull, *flags]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(net.hosts))]
    launch += ["--nproc_per_node", str(per_host), "--master_addr", first]
    launch += ["--master_port", "29500"]
    return [
        (host, [*launch, "--node_rank", str(rank), *script]) for rank, host in enumerate(net.hosts)
    ]


def ours(
    net: Network, work: str, per_host: int, scratch: Path, steps: int, *settings: str
) -> list[tuple[Host, list[str]]]:
    first, token = net.hosts[0].address, scratch / "token"
    key_for(token)
    workers = per_host * len(net.hosts)
    batch = WORKS[work].batch
    sets = [f"train.batch={batch}", f"train.micro_batch={batch // workers}", f"train.steps={steps}"]
    train = [sys.executable, "-m", "manyhands", "train", str(HERE / "manyhands_contestant.py")]
    train += ["--quiet", "--to", str(scratch / "run"), "--workers", f"{workers}:{workers}"]
    train += ["--hosts", f"here:{per_host}", "--listen", f"{first}:{PORT}"]
    train += ["--token-file", str(token)]
    train += [word for s in (*sets, *settings) for word in ("--set", s)]
    join = [sys.executable, "-m", "manyhands", "worker", "--join", f"{first}:{PORT}"]
    join += ["--token-file", str(token), "--slots", str(per_host)]
    others = [(host, [*join, "--name", host.name]) for host in net.hosts[1:]]
    return [(net.hosts[0], train), *others]


def samples_per_s(
    net: Network, contestant: str, work: str, per_host: int, steps: int, *settings: str
) -> float:
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        times = scratch / "times"
        times.mkdir()
        variables = {"BENCHMARK_WORK": work, clock.STEPS: str(steps), clock.FOLDER: str(times)}
        if contestant.startswith("ddp"):
            flags = ["--fused"] if contestant == "ddp-fused" else []
            commands = ddp(net, work, per_host, *flags)
            variables |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": interface(net.hosts[0])}
        else:
            commands = ours(net, work, per_host, scratch, steps, *settings)
        run_all(commands, variables)
        ended = clock.step_times(times, per_host * len(net.hosts))
    warm = max(1, steps // 10)
    return (steps - warm) * WORKS[work].batch / (ended[-1] - ended[warm - 1])


def run_all(commands: Sequence[tuple[Host, list[str]]], variables: Mapping[str, str]) -> None:
    with tempfile.TemporaryFile("w+") as log:
        running = [
            host.popen(
                command,
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
            for host, command in commands
        ]
        try:
            for process in running:
                process.wait(600)
        finally:
            for process in running:
                process.kill()
                process.wait()
        if any(process.returncode for process in running):
            log.seek(0)
            raise RuntimeError(log.read()[-4000:])


def interface(host: Host) -> str:
    listed = host.run(["ip", "-o", "-4", "addr"], capture_output=True, text=True, check=True)
    return next(line.split()[1] for line in listed.stdout.splitlines() if host.address in line)


def speed(samples: rows.Samples, rounds: int, *, quick: bool, works: Sequence[str]) -> None:
    for shape in SHAPES:
        for link, mbit in LINKS.items():
            with Network(hosts=shape[0]) as net:
                net.limit(mbit)
                for work in works:
                    steps = max(4, STEPS[work] // 5) if quick else STEPS[work]
                    for _ in range(rounds):
                        for contestant in ("ddp", "ddp-fused", "manyhands"):
                            found = samples_per_s(net, contestant, work, shape[1], steps)
                            name = name_of(work, shape, link)
                            key = (name, contestant, "samples_per_s")
                            samples.setdefault(key, []).append(found)
                            console.print(f"{name}  {contestant:<10} {found:,.0f} samples/s")


# ---- encrypt


def encrypt(samples: rows.Samples, rounds: int, *, quick: bool, works: Sequence[str]) -> None:
    for shape, (link, mbit) in itertools.product(SHAPES, LINKS.items()):
        with Network(hosts=shape[0]) as net:
            net.limit(mbit)
            for work, turn in itertools.product(works, range(rounds)):
                steps = max(4, STEPS[work] // 5) if quick else STEPS[work]
                name = f"{name_of(work, shape, link)} {SEALED}"
                for contestant in ("plain", "manyhands")[:: -1 if turn % 2 else 1]:
                    sealed = f"train.encrypt={'true' if contestant == 'manyhands' else 'false'}"
                    found = samples_per_s(net, contestant, work, shape[1], steps, sealed)
                    samples.setdefault((name, contestant, "samples_per_s"), []).append(found)
                    console.print(f"{name}  {contestant:<10} {found:,.0f} samples/s")


# ---- overlap


def overlap(samples: rows.Samples, rounds: int, *, quick: bool) -> None:
    with Network(hosts=2) as net:
        for link, work, _ in itertools.product(SLOW, STEPS_OF_OVERLAP, range(rounds)):
            net.limit(SLOW[link])
            steps, batch = STEPS_OF_OVERLAP[work] // (4 if quick else 1), WORKS[work].batch
            on, off = (
                batch / samples_per_s(net, "manyhands", work, 1, steps, f"train.overlap={word}")
                for word in ("true", "false")
            )
            backward, exchange = backward_s(work), exchange_s(net, work)
            gain = (off - on) / min(backward, exchange)
            samples.setdefault((f"{work} 2x1 {link}", "manyhands", "gain"), []).append(gain)
            console.print(
                f"{work} {link}: a step takes {off:.3f} s without and {on:.3f} s with it; backward "
                f"{backward:.3f} s, exchange {exchange:.3f} s: gain {gain:.2f}"
            )


def backward_s(name: str) -> float:
    """Of one micro-batch, with one thread; two at a time, as both hosts do it."""
    code = f"""
import statistics, sys, time, torch
sys.path.insert(0, {str(HERE)!r})
from works import WORKS
torch.set_num_threads(1)
work = WORKS[{name!r}]
model, data, took = work.model(), work.data(), []
batch = {{k: v[: work.per_worker] for k, v in data.items()}}
for _ in range(12):
    loss = work.loss(model, batch)
    begun = time.perf_counter()
    loss.backward()
    took.append(time.perf_counter() - begun)
    model.zero_grad()
print(statistics.median(took[2:]))
"""
    pair = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    return statistics.median(float(p.communicate(timeout=300)[0]) for p in pair)


def exchange_s(net: Network, name: str) -> float:
    """A vector as long as the model's, exchanged and shared between two idle hosts."""
    numel = sum(p.numel() for p in WORKS[name].model().parameters())
    code = """
import statistics, sys, threading, time, torch
from manyhands.training.collective.handshake import PeerListener
from manyhands.training.collective.sockets import Sockets
from manyhands.values.world import World
rank, numel, mine = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
class Patient:
    def broken(self): return False
    def __enter__(self): ...
    def __exit__(self, *error): ...
listener = PeerListener(mine)
print(listener.address, flush=True)
addresses = sys.stdin.readline().split()
slots = [{torch.float32: torch.ones(numel)}]
half = numel // 2
owned = [{torch.float32: (0, half)}, {torch.float32: (half, numel)}]
links = Sockets(World(rank, 2, (1, 1)), slots, listener=listener, addresses=addresses, generation=1,
              secret=bytes(32), patience=Patient())
took = []
for _ in range(8):
    begun = time.perf_counter()
    links.exchange([1, 1], owned)
    links.share(slots[0], owned)
    took.append(time.perf_counter() - begun)
print(statistics.median(took[2:]))
"""
    pair = [
        host.popen(
            [sys.executable, "-c", code, str(rank), str(numel), host.address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, host in enumerate(net.hosts)
    ]
    addresses = " ".join(p.stdout.readline().strip() for p in pair if p.stdout is not None)
    for process in pair:
        assert process.stdin is not None
        process.stdin.write(addresses + "\n")
        process.stdin.flush()
    return max(float(p.communicate(timeout=120)[0]) for p in pair)


# ---- recovery


def recovery(samples: rows.Samples, rounds: int) -> None:
    for _ in range(rounds):
        for what in SECONDS:
            with Network(hosts=3) as net, tempfile.TemporaryDirectory() as folder:
                took = recovered(net, Path(folder), what)
            samples.setdefault((what, "manyhands", "seconds"), []).append(took)
            console.print(f"{what}: the next step {took:.2f} s after it")


def recovered(net: Network, folder: Path, what: str) -> float:
    settings = ("log.every_steps=1", "recovery.rebalance=false", "train.micro_batch=32")
    commands = ours(net, "mlp", 1, folder, 100_000, *settings)
    variables = {"BENCHMARK_WORK": "mlp", clock.STEPS: "0", clock.FOLDER: str(folder)}
    commands[0][1][commands[0][1].index("3:3")] = "1:3"  # two must be enough afterwards
    diary, victim = Diary(folder / "run" / "events.jsonl"), net.hosts[1]
    with (folder / "log").open("w") as log:
        for host, command in commands:
            host.popen(command, env={**os.environ, **variables}, stdout=log, stderr=log)
    try:
        diary.wait(lambda e: e["event"] == "Viewed" and len(e["members"]) == 3)
        reached = diary.wait(lambda e: e["event"] == "Stepped")["step"] + 300
        diary.wait(lambda e: e["event"] == "Stepped" and e["step"] >= reached)
        begun = time.time()
        match what:
            case "kill":
                os.kill(diary.worker_on(victim), signal.SIGKILL)
            case "host":
                net.isolate(victim)
                victim.kill()
            case _:
                net.isolate(victim)
        diary.read()
        diary.wait(lambda e: e["event"] == "Viewed" and e["time"] > begun)
        return diary.wait(lambda e: e["event"] == "Stepped")["time"] - begun
    finally:
        for host in net.hosts:
            host.kill()


class Diary:
    """events.jsonl of a run that goes on."""

    def __init__(self, path: Path) -> None:
        self.path, self.seen, self.members = path, 0, list[int]()

    def read(self) -> list[dict[str, Any]]:
        """What is new."""
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        found = [json.loads(line) for line in lines[self.seen :] if line.endswith("}")]
        self.seen += len(found)
        for event in found:
            if event["event"] == "Viewed":
                self.members = list(event["members"].values())
        return found

    def wait(self, what: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            for event in self.read():
                if what(event):
                    return event
            time.sleep(0.01)
        raise RuntimeError(f"it did not come to that: {self.path}")

    def worker_on(self, host: Host) -> int:
        return next(pid for pid in self.members if pid in host.pids())


def reference(metric: str, values: Mapping[str, float]) -> float | None:
    if metric == "samples_per_s":
        if "plain" in values:
            return values["plain"]
        return max((values[c] for c in ("ddp", "ddp-fused") if c in values), default=None)
    return None


def main() -> None:
    parser = rows.arguments(__doc__)
    parser.add_argument("--only", default="speed,overlap,recovery")
    parser.add_argument("--works", default="mlp,gpt")
    asked = parser.parse_args()
    if (reason := why_not()) is not None:
        sys.exit(f"networks cannot be made here: {reason}")
    torch.set_num_threads(1)
    samples: rows.Samples = {}
    rounds, parts = rows.rounds_of(asked), asked.only.split(",")
    if "speed" in parts:
        speed(samples, rounds, quick=asked.quick, works=asked.works.split(","))
    if "overlap" in parts:
        overlap(samples, rounds, quick=asked.quick)
    if "recovery" in parts:
        recovery(samples, rounds)
    if "encrypt" in parts:
        encrypt(samples, rounds, quick=asked.quick, works=asked.works.split(","))
    rows.report(rows.summarise(samples, reference), METRICS, TARGETS, asked.json)


if __name__ == "__main__":
    main()
