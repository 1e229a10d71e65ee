# SPDX-License-Identifier: Apache-2.0
"""Servers: what a push and a pull cost, how fast training is with them, and the death of one.

    python benchmarks/parameter_server.py [--quick] [--only transfer,training,takeover]
                                          [--rounds 3] [--json FILE]

transfer: one worker and one server. A turn begins with the gradient where backward left it, and
ends with the new weights in memory of the worker's own; counted are the bytes of both, in GB/s.

    copy-pair      the limit in one process: shared memory copied to shared memory, and from there
    unix, tcp      a socket pair, and a connection over loopback: sendall, and recv_into in place
    no-rule        our server's turns as they are, but it only puts down what was pushed
    adamw          the same with fused AdamW under the undo log
    adamw-trained  the same with what a worker does beside it: the gradient is copied out of .grad
                   and looked at for numbers that are not finite

In a turn of the limits one side waits for the other; in ours the worker may push once more before
the last push was applied, as when it trains. Ratios are to copy-pair (and of "over tcp" to tcp).

training: samples/s and memory of the MLP (works.py) with two workers of one thread. In sync a batch
is computed by both, in the others each computes whole ones. Where TENSORFLOW_PYTHON names a Python
that has TensorFlow, its ParameterServerStrategy trains the same MLP on as large batches, each by
one worker and applied as it comes (server_peers/tensorflow_servers.py). Ratios are to allreduce.
The first tenth of the steps is not counted; memory is the peak of all processes (see commands.py).

takeover: one of two servers, and the only one, gets `kill -9`, again and again in one run, when all
have been training for a second; the seconds until a step was applied beyond those with which the
run says that it went on, in the median and at worst: what had been begun, or pushed, when the kill
came is among these. "noticed" is what the run tells itself, from noticing it until it went on.
"""

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import clock
import commands
import psutil
import rows
from data_parallel import names_of
from recovery_peers import diary
from recovery_peers.proof import Diaries
from recovery_peers.session import running
from rows import Metric, Wanted, console
from works import WORKERS, WORKS

HERE = Path(__file__).parent
PEERS = HERE / "server_peers"
IMPORTS = {
    "PYTHONPATH": f"{HERE}:{HERE / 'recovery_peers'}:{HERE.parent}:{os.getenv('PYTHONPATH', '')}"
}

# ---- transfer

SIZES = {"4 MB": 4 << 20, "64 MB": 64 << 20}
TRANSFERS = ("copy-pair", "unix", "tcp", "no-rule", "adamw", "adamw-trained")
SPEED = (Metric("gb_per_s", "GB/s", digits=2), Metric("over_tcp", "over tcp", digits=2))
LIMITS = {"no-rule": (0.8, 0.8), "adamw": (0.35, 0.5)}
"""What is wanted of ours, as parts of copy-pair and of tcp."""


def transfer(asked: argparse.Namespace) -> list[rows.Row]:
    samples: rows.Samples = {}
    for size, nbytes in SIZES.items():
        turns = max(10, (1 << (30 if asked.quick else 33)) // nbytes // 4)
        for round in range(rows.rounds_of(asked)):
            found: dict[str, float] = {}
            for name in TRANSFERS:
                script = [sys.executable, str(PEERS / "transfer.py"), name, str(nbytes), str(turns)]
                seconds = float(
                    subprocess.check_output(
                        script, env={**os.environ, **IMPORTS}, text=True, timeout=300
                    )
                )
                found[name] = 2 * nbytes / seconds / 1e9
                console.print(
                    f"transfer {size} round {round + 1}  {name:<14} {found[name]:.2f} GB/s"
                )
            for name, speed in found.items():
                samples.setdefault((size, name, "gb_per_s"), []).append(speed)
                samples.setdefault((size, name, "over_tcp"), []).append(speed / found["tcp"])
    listed = rows.summarise(
        samples, lambda metric, values: values["copy-pair"] if metric == "gb_per_s" else None
    )
    by_place = {(row.work, row.contestant, row.metric): row for row in listed}
    for size in SIZES:
        for name, (of_copies, of_tcp) in LIMITS.items():
            copies = by_place[size, name, "gb_per_s"].ratio or math.nan
            over = by_place[size, name, "over_tcp"].value
            console.print(
                f"{size} {name}: {copies:.0%} of copy-pair (wanted: {of_copies:.0%}), "
                f"{over:.0%} of tcp (wanted: {of_tcp:.0%})"
            )
    return listed


# ---- training

METRICS = (Metric("samples_per_s", "samples/s"), Metric("peak_memory_mb", "memory MB"))
WITHIN = {("training", "samples_per_s"): Wanted("≥", 0.8)}


@dataclass(frozen=True, slots=True)
class Way:
    sync: str
    servers: int
    together: bool = True
    """All take each step at the same time."""


WAYS = {
    "allreduce": Way("allreduce", 0),
    "server-1": Way("server:count=1", 1),
    "server-2": Way("server:count=2", 2),
    "async-1": Way("server:count=1,mode=async", 1, together=False),
    "async-2": Way("server:count=2,mode=async", 2, together=False),
    "stale-1": Way("server:count=1,mode=stale,staleness=2", 1, together=False),
}
TENSORFLOW = {"tensorflow-1": 1, "tensorflow-2": 2}
"""Contestant → servers."""


def train(way: Way, steps: int) -> dict[str, float]:
    work = WORKS["mlp"]
    with tempfile.TemporaryDirectory() as scratch:
        times, run = Path(scratch) / "times", Path(scratch) / "run"
        times.mkdir()
        settings = [
            f"train.batch={work.batch}",
            f"train.micro_batch={work.batch // WORKERS}",
            f"train.steps={steps}",
        ]
        command = ["-m", "manyhands", "train", str(HERE / "manyhands_contestant.py"), "--quiet"]
        command += ["--workers", str(WORKERS), "--to", str(run), "--sync", way.sync]
        command += [word for setting in settings for word in ("--set", setting)]
        variables = {"BENCHMARK_WORK": "mlp", clock.STEPS: str(steps), clock.FOLDER: str(times)}
        ran = commands.run(
            [sys.executable, *command], variables={**IMPORTS, **variables}, timeout_s=600
        )
        ended = applied_at(times, run, way)
    warm = max(1, steps // 10)
    return {
        "samples_per_s": (steps - warm) * work.batch / (ended[-1] - ended[warm - 1]),
        "peak_memory_mb": ran.peak_memory_bytes / 1e6,
    }


def applied_at(times: Path, run: Path, way: Way) -> list[float]:
    """When each step had been applied: by all, or by the first server, who waits for the others."""
    if way.together:
        return clock.step_times(times, WORKERS + way.servers)
    views = [event for event in events_of(run) if event["event"] == "Viewed"]
    if len(views) != 1:
        raise RuntimeError(f"{len(views)} views in a calm run: {[v['because'] for v in views]}")
    return json.loads((times / f"{views[0]['members']['0']}.json").read_text())


def events_of(run: Path) -> list[dict[str, Any]]:
    *lines, _ = (run / "events.jsonl").read_text().split("\n")  # the last may not be whole yet
    return [json.loads(line) for line in lines]


def train_tensorflow(python: str, servers: int, steps: int) -> dict[str, float]:
    work = WORKS["mlp"]
    with tempfile.TemporaryDirectory() as scratch:
        told = Path(scratch) / "told.json"
        numbers = {
            "servers": servers,
            "workers": WORKERS,
            "steps": steps,
            "batch": work.batch,
            "records": len(work.data()["y"]),
        }
        given = [word for name, n in numbers.items() for word in (f"--{name}", str(n))]
        script = [python, str(PEERS / "tensorflow_servers.py"), *given, "--to", str(told)]
        ran = commands.run(script, variables={"PYTHONPATH": ""}, timeout_s=600)
        speed = json.loads(told.read_text())["samples_per_s"]
    return {"samples_per_s": speed, "peak_memory_mb": ran.peak_memory_bytes / 1e6}


def training(asked: argparse.Namespace) -> list[rows.Row]:
    steps = max(60, WORKS["mlp"].steps // 5) if asked.quick else 2 * WORKS["mlp"].steps
    contestants: dict[str, Callable[[], dict[str, float]]] = {
        name: (lambda way=way: train(way, steps)) for name, way in WAYS.items()
    }
    if python := os.environ.get("TENSORFLOW_PYTHON"):
        contestants |= {
            name: (lambda servers=servers: train_tensorflow(python, servers, steps))
            for name, servers in TENSORFLOW.items()
        }
    else:
        console.print("tensorflow is left out: TENSORFLOW_PYTHON names no Python that has it")
    samples: rows.Samples = {}
    for round in range(rows.rounds_of(asked)):
        for name, measure in contestants.items():
            found = measure()
            for metric, value in found.items():
                samples.setdefault(("training", name, metric), []).append(value)
            told = "  ".join(f"{m.title} {m.show(found[m.name])}" for m in METRICS)
            console.print(f"training round {round + 1}  {name:<13} {told}")
    return rows.summarise(samples, lambda metric, values: values.get("allreduce"))


# ---- takeover

SECONDS = (
    Metric("median_s", "median s", digits=3),
    Metric("worst_s", "worst s", digits=3),
    Metric("noticed_s", "noticed s", digits=3),
)
SOON = {
    ("takeover", "median_s"): Wanted("≤", 0.1, of_ratio=False),
    ("takeover", "worst_s"): Wanted("≤", 0.5, of_ratio=False),
}
STEADY_S, START_S, LIMIT_S = 1.0, 120.0, 60.0
KILLED = {
    "sync-1": Way("server:count=1", 1),
    "sync-2": Way("server:count=2", 2),
    "async-1": Way("server:count=1,mode=async", 1, together=False),
    "async-2": Way("server:count=2,mode=async", 2, together=False),
}


def take_over(way: Way, kills: int) -> tuple[list[float], list[float]]:
    """One run: the seconds after each kill, and as the run tells them."""
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        (scratch / "diaries").mkdir()
        run, log = scratch / "run", scratch / "log"
        command = [sys.executable, "-m", "manyhands", "train", str(PEERS / "noted_task.py")]
        command += ["--quiet", "--workers", str(WORKERS), "--to", str(run), "--sync", way.sync]
        variables = {**IMPORTS, diary.FOLDER: str(scratch / "diaries"), "TMPDIR": folder}
        diaries = Diaries(scratch / "diaries")
        found: list[float] = []
        with running(command, variables, log) as process:
            for k in range(kills):
                servers = steady_servers(process, run, way, log)
                found.append(kill(servers[k % len(servers)], diaries, run, process, log))
        return found, [event["seconds"] for event in recoveries(run)]


def steady_servers(process: psutil.Popen, run: Path, way: Way, log: Path) -> list[int]:
    """Their processes, when all that are wanted have been there for a while."""
    late = time.monotonic() + START_S
    seen: tuple[frozenset[int], float] = (frozenset(), 0.0)
    while True:
        if process.poll() is not None or time.monotonic() > late:
            raise RuntimeError(f"it does not train:\n{log.read_text()[-4000:]}")
        time.sleep(0.05)
        try:
            now = json.loads((run / "status.json").read_text())
        except (OSError, ValueError):
            continue
        members = {w["pid"]: w["serves"] for w in now["workers"]}
        if frozenset(members) != seen[0]:
            seen = frozenset(members), time.monotonic()
        all_here = len(members) == WORKERS + way.servers
        serving = [pid for pid, serves in members.items() if serves]
        steady = time.monotonic() - seen[1] > STEADY_S
        if all_here and len(serving) == way.servers and steady and now["step"] > 0:
            return serving


def kill(victim: int, diaries: Diaries, run: Path, process: psutil.Popen, log: Path) -> float:
    """Seconds until a step is done beyond those with which the run says that it went on: what had
    been begun, or pushed, when the kill came is among these."""
    if victim not in {p.pid for p in psutil.Process().children(recursive=True)}:
        raise RuntimeError(f"process {victim} is not one of its own")
    before = len(recoveries(run))
    killed_ns = time.monotonic_ns()
    os.kill(victim, signal.SIGKILL)
    while time.monotonic_ns() - killed_ns < LIMIT_S * 1e9:
        ended = process.poll() is not None
        went_on = [event["step"] for event in recoveries(run)[before:]]
        noted = [line for lines in diaries.read().values() for line in lines]
        after = [at for at, done in noted if at > killed_ns and went_on and done > went_on[0]]
        if after:
            return (min(after) - killed_ns) / 1e9
        if ended:
            break
        time.sleep(0.02)
    raise RuntimeError(f"nobody took over:\n{log.read_text()[-4000:]}")


def recoveries(run: Path) -> list[dict[str, Any]]:
    return [event for event in events_of(run) if event["event"] == "Recovered"]


def takeover(asked: argparse.Namespace) -> list[rows.Row]:
    samples: rows.Samples = {}
    for round in range(rows.rounds_of(asked)):
        for name, way in KILLED.items():
            found, noticed = take_over(way, 3 if asked.quick else asked.kills)
            samples.setdefault(("takeover", name, "median_s"), []).extend(found)
            samples.setdefault(("takeover", name, "noticed_s"), []).extend(noticed)
            told = " ".join(f"{seconds:.3f}" for seconds in found)
            console.print(f"takeover round {round + 1}  {name:<8} {told} s")
    listed = rows.summarise(samples, lambda metric, values: None)
    worst = {place: max(values) for place, values in samples.items() if place[2] == "median_s"}
    return [
        *listed,
        *(rows.Row(name, work, "worst_s", value, None) for (work, name, _), value in worst.items()),
    ]


Part = tuple[
    Callable[[argparse.Namespace], list[rows.Row]],
    tuple[Metric, ...],
    Mapping[tuple[str, str], Wanted],
    str,
]
PARTS: dict[str, Part] = {
    "transfer": (transfer, SPEED, {}, "adamw"),
    "training": (training, METRICS, WITHIN, "server-1"),
    "takeover": (takeover, SECONDS, SOON, "sync-1"),
}
"""How it is measured, what of it, what is wanted, and of whom."""


def main() -> None:
    parser = rows.arguments(__doc__)
    parser.add_argument("--only", type=names_of(PARTS), default=list(PARTS), metavar="PART,...")
    parser.add_argument("--kills", type=int, default=12, help="of takeover, in each run")
    asked = parser.parse_args()
    everything: list[rows.Row] = []
    for part in asked.only:
        measure, metrics, targets, ours = PARTS[part]
        found = measure(asked)
        everything += found
        rows.report(found, metrics, targets, None, ours=ours)
    if asked.json is not None:
        asked.json.write_text(json.dumps([asdict(row) for row in everything], indent=1) + "\n")


if __name__ == "__main__":
    main()
