# SPDX-License-Identifier: Apache-2.0
"""Data-parallel training: bare DDP under torchrun with gloo, and ours; two workers of one thread.

    python benchmarks/data_parallel.py [--quick] [--only mlp,gpt] [--rounds 3] [--json FILE]

Every contestant is a real command, started anew for every measurement; within a work they take
turns, round by round, so that a slow minute of the machine hits all of them.

    ddp            torchrun, gloo, AdamW as it comes
    ddp-fused      the same with AdamW(fused=True)
    manyhands      `manyhands train`, fused, one micro-batch per worker
    manyhands-m8   the same batch in 8 micro-batches: the price of weights that do not depend on
                   the number of workers, up to 8 of them
    accelerate, lightning   the same loop in Accelerate and in Lightning Fabric, fused; only where
                   they are installed. Ray Train is left out: it runs DDP in workers of a cluster
                   that would have to be started first.

samples/s is of the steady state: the first tenth of the steps is not counted. Start-up goes from
the start of the command to the end of the first optimizer step. Memory is the peak over the whole
command, all its processes, the final save included (see commands.py). Ratios are to the faster of
ddp and ddp-fused for samples/s, and to ddp otherwise.
"""

import argparse
import importlib.util
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import clock
import commands
import rows
from rows import Metric, Wanted, console
from works import WORKERS, WORKS, Work

HERE = Path(__file__).parent

METRICS = (
    Metric("samples_per_s", "samples/s"),
    Metric("startup_s", "start-up s", digits=2),
    Metric("peak_memory_mb", "memory MB"),
)

FASTER = {"mlp": 1.5, "gpt": 1.1, "cnn": 1.0}
TARGETS = {
    **{(work, "samples_per_s"): Wanted("≥", least) for work, least in FASTER.items()},
    **{(work, "startup_s"): Wanted("≤", 0.5) for work in FASTER},
    **{(work, "peak_memory_mb"): Wanted("<", 1.0) for work in FASTER},
}

Command = Callable[[str, Work, int, Path], list[str]]
"""(name of the work, work, steps, where to save) → the command line."""


def torchrun(*flags: str) -> Command:
    def command(name: str, work: Work, steps: int, to: Path) -> list[str]:
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(WORKERS)]
        script = [str(HERE / "ddp_contestant.py"), name, "--to", str(to), *flags]
        return [sys.executable, *launch, *script]

    return command


def manyhands(micro_batches: int, *more: str) -> Command:
    def command(name: str, work: Work, steps: int, to: Path) -> list[str]:
        settings = [
            f"train.batch={work.batch}",
            f"train.micro_batch={work.batch // micro_batches}",
            f"train.steps={steps}",
            *more,
        ]
        train = ["-m", "manyhands", "train", str(HERE / "manyhands_contestant.py"), "--quiet"]
        train += ["--workers", str(WORKERS), "--to", str(to)]
        train += [word for setting in settings for word in ("--set", setting)]
        return [sys.executable, *train]

    return command


CONTESTANTS = {
    "ddp": torchrun(),
    "ddp-fused": torchrun("--fused"),
    "manyhands": manyhands(WORKERS),
    "manyhands-m8": manyhands(8),
}
CONTESTANTS |= {
    name: torchrun("--fused", "--wrap", name)
    for name in ("accelerate", "lightning")
    if importlib.util.find_spec(name)
}


def measure(contestant: str, name: str, steps: int, timeout_s: float) -> dict[str, float]:
    """Run one contestant once; metric → value."""
    work = WORKS[name]
    with tempfile.TemporaryDirectory() as scratch:
        times = Path(scratch) / "times"
        times.mkdir()
        command = CONTESTANTS[contestant](name, work, steps, Path(scratch) / "saved")
        variables = {"BENCHMARK_WORK": name, clock.STEPS: str(steps), clock.FOLDER: str(times)}
        if not contestant.startswith("manyhands"):  # ours has one thread without being told
            variables["OMP_NUM_THREADS"] = "1"
        ran = commands.run(command, variables=variables, timeout_s=timeout_s)
        ended = clock.step_times(times, WORKERS)
    warm = max(1, steps // 10)
    return {
        "samples_per_s": (steps - warm) * work.batch / (ended[-1] - ended[warm - 1]),
        "startup_s": ended[0] - ran.started,
        "peak_memory_mb": ran.peak_memory_bytes / 1e6,
    }


def reference(metric: str, values: Mapping[str, float]) -> float | None:
    if metric == "samples_per_s":
        return max((values[c] for c in ("ddp", "ddp-fused") if c in values), default=None)
    return values.get("ddp")


def main() -> None:
    parser = rows.arguments(__doc__)
    parser.add_argument("--only", type=names_of(WORKS), default=list(FASTER), metavar="WORK,...")
    parser.add_argument(
        "--contestants", type=names_of(CONTESTANTS), default=list(CONTESTANTS), metavar="NAME,..."
    )
    parser.add_argument("--timeout-s", type=float, default=600, help="for each command")
    asked = parser.parse_args()
    if not asked.quick:
        console.print("warming up the disk cache, not counted")
        for contestant in asked.contestants:
            measure(contestant, asked.only[0], steps=3, timeout_s=asked.timeout_s)
    samples: rows.Samples = {}
    for name in asked.only:
        steps = max(4, WORKS[name].steps // 5) if asked.quick else WORKS[name].steps
        for round in range(rows.rounds_of(asked)):
            for contestant in asked.contestants:
                found = measure(contestant, name, steps, asked.timeout_s)
                for metric, value in found.items():
                    samples.setdefault((name, contestant, metric), []).append(value)
                told = "  ".join(f"{m.title} {m.show(found[m.name])}" for m in METRICS)
                console.print(f"{name} round {round + 1}  {contestant:<13} {told}")
    rows.report(rows.summarise(samples, reference), METRICS, TARGETS, asked.json)


def names_of(known: Mapping[str, object]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = text.split(",")
        if strange := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"no {strange[0]!r}; there are {', '.join(known)}")
        return names

    return parse


if __name__ == "__main__":
    main()
