# SPDX-License-Identifier: Apache-2.0
"""Losing a worker, having a slow one, and what being ready for it costs.

    python benchmarks/recovery.py [--quick] [--only recovery,unequal] [--rounds 5] [--json FILE]
    python benchmarks/recovery.py --only overhead --before CHECKOUT

recovery: one of two workers gets `kill -9` after two seconds of steady training of a small MLP.
Counted are the seconds until the next step is done, one that was begun after the kill and lies
beyond everything done before it; until both places have such a step again; and how many steps that
were done had to be done again. A worker that begins step s + 1 proves that step s is done. Who has
no next step 60 s after the kill, or has ended by then, never recovered.

    manyhands      `manyhands train`, as it comes
    torchrun       DDP over gloo; torchrun restarts all workers, they load a checkpoint
    ray-train      a TorchTrainer, which does the same in actors; as it comes, its controller looks
                   every 2 s, and a worker that reports a checkpoint waits for it to look
    ray-train-quick  the same, looking every 0.1 s
    torchft        the other goes on without the lost one, which comes back later; its lighthouse
                   as in torchft's README. With torchft 0.2.0 the other dies too, in torchft's
                   wrapper of DDP, and all steps are lost; torchft-nightly 2026.10.26 is mended
    torchft-quick  the same with a heart that has stopped after 0.5 s instead of 5 s

Contestants that need a checkpoint write one every 5 steps (`--every`). Peers are looked for in the
interpreters of BENCH_PEERS_PYTHON (separated by colons), then in this one, and left out with the
reason where they cannot be imported. Ratios are to torchrun.

unequal: samples/s in 16 micro-batches while rank 1 takes twice as long for each of its own, over
the second half of the steps, with the deal following the workers' speeds and with it fixed (the
reference); and with two equal workers.

overhead: data_parallel.py's manyhands of an older checkout (`--before`, such as a git worktree)
against this one's, on calm runs.
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
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from unittest import mock

import clock
import commands
import data_parallel
import psutil
import rows
from recovery_peers import diary
from recovery_peers.proof import Diaries, Recovery, judge
from recovery_peers.session import running
from rows import Metric, console
from works import WORKERS, WORKS

HERE = Path(__file__).parent
PEERS = HERE / "recovery_peers"
IMPORTS = {"PYTHONPATH": f"{HERE}:{PEERS}:{os.getenv('PYTHONPATH', '')}".rstrip(":")}

STEADY_S, LIMIT_S, BOTH_S, START_S = 2.0, 60.0, 20.0, 120.0
"""Training before the kill; for the next step; for both workers after that; for a start."""


class OrNever:
    """A metric that says "never" where the value is infinite."""

    def __init__(self, name: str, title: str, digits: int) -> None:
        self.metric = Metric(name, title, digits)
        self.name, self.title = name, title

    def show(self, value: float) -> str:
        return "never" if math.isinf(value) else self.metric.show(value)


METRICS = (
    OrNever("next_step_s", "next step s", 2),
    OrNever("both_again_s", "both again s", 2),
    OrNever("steps_lost", "steps lost", 0),
)


# ---- contestants of recovery


def rank_in_diaries(scratch: Path, rank: int) -> int:
    (found,) = (scratch / "diaries").glob(f"{rank}-*")
    return int(found.name.split("-")[1])


def rank_in_events(scratch: Path, rank: int) -> int:
    lines = (scratch / "run" / "events.jsonl").read_text().splitlines()
    views = [event for event in map(json.loads, lines) if event["event"] == "Viewed"]
    return views[-1]["members"][str(rank)]


@dataclass(frozen=True, slots=True)
class Contestant:
    command: Callable[[str, Path], list[str]]
    """(Python to run it with, folder for all it writes) → the command line."""
    needs: str = "torch"
    """What that Python must be able to import."""
    variables: Mapping[str, str] = field(default_factory=dict)
    process_of: Callable[[Path, int], int] = rank_in_diaries


def manyhands(python: str, scratch: Path) -> list[str]:
    train = ["-m", "manyhands", "train", str(PEERS / "manyhands_task.py"), "--quiet"]
    return [python, *train, "--workers", str(WORKERS), "--to", str(scratch / "run")]


def torchrun(python: str, scratch: Path) -> list[str]:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(WORKERS)]
    script = [str(PEERS / "torchrun_worker.py"), str(scratch / "checkpoint.pt")]
    return [python, *launch, "--max-restarts", "3", *script]


def ray_train(python: str, scratch: Path) -> list[str]:
    return [python, str(PEERS / "ray_driver.py"), str(scratch)]


def torchft(**flags: int) -> Callable[[str, Path], list[str]]:
    given = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return lambda python, scratch: [python, str(PEERS / "torchft_cluster.py"), *given]


NO_STATISTICS = {"RAY_USAGE_STATS_ENABLED": "0"}

CONTESTANTS = {
    "manyhands": Contestant(manyhands, "manyhands", process_of=rank_in_events),
    # Restarted workers may otherwise read what the last ones left in the agent's store.
    # https://github.com/pytorch/pytorch/issues/135712
    "torchrun": Contestant(torchrun, variables={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}),
    "ray-train": Contestant(ray_train, "ray.train.torch", NO_STATISTICS),
    "ray-train-quick": Contestant(
        ray_train, "ray.train.torch", {**NO_STATISTICS, "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1"}
    ),
    "torchft": Contestant(torchft(quorum_tick_ms=100, join_timeout_ms=10_000), "torchft"),
    "torchft-quick": Contestant(
        torchft(quorum_tick_ms=20, join_timeout_ms=10_000, heartbeat_timeout_ms=500), "torchft"
    ),
}


VERSION = """
import {0}
from importlib import metadata
package = metadata.packages_distributions()["{0}".split(".")[0]][0]
print(package, metadata.version(package))
"""


def python_with(module: str) -> tuple[str | None, str]:
    """An interpreter that can import `module` and the version it has; or None, and why not."""
    given = os.environ.get("BENCH_PEERS_PYTHON", "").split(os.pathsep)
    ours = module in ("manyhands", "torch")  # taken as they are here
    found = "no interpreter was tried"
    for python in [sys.executable] if ours else [*filter(None, given), sys.executable]:
        try:
            tried = subprocess.run(
                [python, "-c", VERSION.format(module)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=START_S,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            found = str(error)
            continue
        said = tried.stdout.strip().splitlines() or ["(no word)"]
        found = f"{said[-1]} in {python}"
        if tried.returncode == 0:
            return python, found
    return None, found


# ---- running one of them


def recover(name: str, python: str, *, rank: int, every: int) -> Recovery:
    """One run with one kill."""
    contestant = CONTESTANTS[name]
    # In /tmp and short: Ray's sockets lie below it.
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="r") as folder:
        scratch = Path(folder)
        (scratch / "diaries").mkdir()
        variables = {
            **IMPORTS,
            **contestant.variables,
            diary.FOLDER: str(scratch / "diaries"),
            diary.EVERY: str(every),
            "OMP_NUM_THREADS": "1",
            "TMPDIR": folder,
        }
        diaries, log = Diaries(scratch / "diaries"), scratch / "log"
        with running(contestant.command(python, scratch), variables, log) as process:
            late = time.monotonic() + START_S
            while not diaries.are_steady(WORKERS, STEADY_S):
                if process.poll() is not None or time.monotonic() > late:
                    raise RuntimeError(f"{name} does not train:\n{log.read_text()[-4000:]}")
                time.sleep(0.05)
            victim = contestant.process_of(scratch, rank)
            if victim not in {p.pid for p in psutil.Process().children(recursive=True)}:
                raise RuntimeError(f"{name}: process {victim} is not one of its own")
            killed_ns = time.monotonic_ns()
            os.kill(victim, signal.SIGKILL)
            return watch(process, diaries, killed_ns, victim)


def watch(process: psutil.Popen, diaries: Diaries, killed_ns: int, victim: int) -> Recovery:
    """Until both places are filled again, or have had their time."""
    while True:
        ended = process.poll() is not None  # before reading: nothing is written after it
        found = judge(diaries.read(), killed_ns=killed_ns, victim=victim)
        waited_s = (time.monotonic_ns() - killed_ns) / 1e9
        limit_s = min(LIMIT_S, found.next_step_s) + (BOTH_S if found.next_step_s < LIMIT_S else 0)
        if ended or found.both_again_s < math.inf or waited_s > limit_s:
            return found
        time.sleep(0.05)


# ---- the three parts


def recovery(asked: argparse.Namespace) -> list[rows.Row]:
    pythons: dict[str, str] = {}
    for name in asked.contestants:
        python, told = python_with(CONTESTANTS[name].needs)
        console.print(f"{name}{'' if python else ' is left out'}: {told}", markup=False)
        if python is not None:
            pythons[name] = python
    samples: rows.Samples = {}
    for round in range(rows.rounds_of(asked)):
        for name, python in pythons.items():
            found = recover(name, python, rank=asked.rank, every=asked.every)
            told = []
            for metric in METRICS:
                value = getattr(found, metric.name)
                samples.setdefault(("recovery", name, metric.name), []).append(value)
                told.append(f"{metric.title} {metric.show(value)}")
            console.print(f"recovery round {round + 1}  {name:<15} {'  '.join(told)}")
    for (_, name, metric), values in samples.items():
        if metric == "next_step_s" and (lost := sum(map(math.isinf, values))):
            console.print(f"{name} never recovered in {lost} of {len(values)} rounds")
    # Never is not so many times as long as something else, nor something else so many times never.
    return [
        row if math.isfinite(row.value) else replace(row, ratio=None)
        for row in rows.summarise(samples, lambda metric, values: finite(values.get("torchrun")))
    ]


def finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


UNEQUAL = {"fixed": ("--slow", "--fixed"), "manyhands": ("--slow",), "two-equal": ()}
SPEED = (Metric("samples_per_s", "samples/s"),)


def unequal(asked: argparse.Namespace) -> list[rows.Row]:
    samples: rows.Samples = {}
    for name in asked.works or ["mlp", "cnn"]:
        work = WORKS[name]
        steps = max(20, work.steps // 2) if asked.quick else 2 * work.steps
        for round in range(rows.rounds_of(asked)):
            for label, flags in UNEQUAL.items():
                with tempfile.TemporaryDirectory() as scratch:
                    times = Path(scratch) / "times"
                    times.mkdir()
                    script = [str(PEERS / "unequal_run.py"), f"{scratch}/run", str(steps), *flags]
                    told = {"BENCHMARK_WORK": name, clock.STEPS: str(steps)}
                    commands.run(
                        [sys.executable, *script],
                        variables={**IMPORTS, **told, clock.FOLDER: str(times)},
                        timeout_s=600,
                    )
                    refuse_losses(Path(scratch) / "run" / "events.jsonl")
                    ended = clock.step_times(times, WORKERS)
                half = steps // 2
                speed = (steps - half) * work.batch / (ended[-1] - ended[half - 1])
                samples.setdefault((f"unequal {name}", label, "samples_per_s"), []).append(speed)
                console.print(
                    f"unequal {name} round {round + 1}  {label:<13} {speed:,.0f} a second"
                )
    return rows.summarise(samples, lambda metric, values: values.get("fixed"))


def refuse_losses(events: Path) -> None:
    """Nobody is killed in here, so a worker that was replaced is a finding, not a measurement."""
    lost = [line for line in events.read_text().splitlines() if json.loads(line)["event"] == "Lost"]
    if lost:
        raise RuntimeError(f"workers were lost in a calm run: {lost}")


def overhead(asked: argparse.Namespace) -> list[rows.Row]:
    """Each checkout's own package trains the same works with the same settings, in turns.

    The package is found through PYTHONPATH; that it is the right one is looked up first, because
    an installed package or the current folder may come before it.
    """
    samples: rows.Samples = {}
    checkouts = {"before": asked.before.resolve(), "manyhands": HERE.parent.resolve()}
    for label, checkout in checkouts.items():
        with package_of(checkout):
            where = "import manyhands; print(manyhands.__file__)"
            found = subprocess.check_output([sys.executable, "-c", where], text=True).strip()
        if not Path(found).is_relative_to(checkout):
            raise RuntimeError(f"{label}: {found} would run, which is not in {checkout}.")
    for name in asked.works or WORKS:
        steps = max(4, WORKS[name].steps // 5) if asked.quick else WORKS[name].steps
        for round in range(rows.rounds_of(asked)):
            for label, checkout in checkouts.items():
                with package_of(checkout):
                    measured = data_parallel.measure("manyhands", name, steps, 600)
                for metric, value in measured.items():
                    samples.setdefault((f"overhead {name}", label, metric), []).append(value)
                speed = measured["samples_per_s"]
                console.print(
                    f"overhead {name} round {round + 1}  {label:<9} {speed:,.0f} a second"
                )
    return rows.summarise(samples, lambda metric, values: values.get("before"))


@contextmanager
def package_of(checkout: Path) -> Generator[None]:
    """Commands that are started in here use the manyhands of `checkout`."""
    # Safe: the current folder, which may be another checkout, does not come first.
    with mock.patch.dict(os.environ, PYTHONPATH=str(checkout), PYTHONSAFEPATH="1"):
        yield


PARTS = {
    "recovery": (recovery, METRICS),
    "unequal": (unequal, SPEED),
    "overhead": (overhead, data_parallel.METRICS),
}


def main() -> None:
    parser = rows.arguments(__doc__, rounds=5)
    parser.add_argument("--only", type=data_parallel.names_of(PARTS), metavar="PART,...")
    parser.add_argument(
        "--contestants",
        type=data_parallel.names_of(CONTESTANTS),
        default=list(CONTESTANTS),
        metavar="NAME,...",
        help="of recovery",
    )
    parser.add_argument("--rank", type=int, choices=range(WORKERS), default=1, help="to kill")
    parser.add_argument("--every", type=int, default=5, help="steps between peers' checkpoints")
    parser.add_argument(
        "--works",
        type=data_parallel.names_of(WORKS),
        metavar="WORK,...",
        help="of unequal and overhead",
    )
    parser.add_argument("--before", type=Path, metavar="CHECKOUT", help="older one, for overhead")
    asked = parser.parse_args()
    parts = asked.only or ["recovery", "unequal", *(["overhead"] if asked.before else [])]
    if "overhead" in parts and asked.before is None:
        parser.error("overhead needs --before CHECKOUT (git worktree add CHECKOUT COMMIT)")
    everything: list[rows.Row] = []
    for part in parts:
        measure, metrics = PARTS[part]
        found = measure(asked)
        everything += found
        rows.report(found, metrics, {}, None)
    if asked.json is not None:
        listed = [{**asdict(row), "value": finite(row.value)} for row in everything]
        asked.json.write_text(json.dumps(listed, indent=1) + "\n")


if __name__ == "__main__":
    main()
