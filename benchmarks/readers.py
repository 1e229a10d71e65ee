# SPDX-License-Identifier: Apache-2.0
"""Data that takes as long to fetch as a step takes to compute: our readers beside a DataLoader's
workers under DDP (gloo), as many of them; two workers of one thread.

    python benchmarks/readers.py [--quick] [--only cnn] [--fetching waits] [--rounds 3]

    ddp-0, manyhands-0    nobody fetches ahead
    ddp-2, manyhands-2    DataLoader(num_workers=2) of each rank, data.readers=2 of each worker

How long a step takes is measured first, with records that take no time; each record then takes so
long that a worker's part of a step would take as long again. Records that wait are the case that
readers are for; where fetching computes, it needs cores that nobody computes on.
"""

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import clock
import commands
import rows
from rows import Metric, Wanted, console
from works import WORKERS, WORKS

HERE = Path(__file__).parent
METRICS = (Metric("samples_per_s", "samples/s"),)
TARGETS = {(kind, "samples_per_s"): Wanted("≥", 1.0) for kind in ("waits", "computes")}
READERS = 2


def command(contestant: str, batch: int, steps: int, to: Path) -> list[str]:
    name, _, count = contestant.partition("-")
    if name == "ddp":
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(WORKERS)]
        script = str(HERE / "ddp_loader_contestant.py")
        return [sys.executable, *launch, script, "--loaders", count]
    settings = {
        "train.batch": batch,
        "train.micro_batch": batch // WORKERS,
        "train.steps": steps,
        "data.readers": count,
    }
    train = ["-m", "manyhands", "train", str(HERE / "slow_data.py"), "--quiet", "--to", str(to)]
    train += ["--workers", str(WORKERS)]
    train += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    return [sys.executable, *train]


def measure(contestant: str, work: str, steps: int, kind: str, record_s: float) -> float:
    """Samples a second, in the steady state."""
    batch = WORKS[work].batch
    with tempfile.TemporaryDirectory() as scratch:
        times = Path(scratch) / "times"
        times.mkdir()
        variables = {
            "BENCHMARK_WORK": work,
            "BENCHMARK_FETCH": kind,
            "BENCHMARK_FETCH_S": str(record_s),
            "OMP_NUM_THREADS": "1",
            clock.STEPS: str(steps),
            clock.FOLDER: str(times),
        }
        line = command(contestant, batch, steps, Path(scratch) / "saved")
        commands.run(line, variables=variables, timeout_s=600)
        ended = clock.step_times(times, WORKERS)
    warm = max(1, steps // 10)
    return (steps - warm) * batch / (ended[-1] - ended[warm - 1])


def reference(metric: str, values: Mapping[str, float]) -> float | None:
    return values.get(f"ddp-{READERS}")


def main() -> None:
    parser = rows.arguments(__doc__)
    parser.add_argument("--only", default="cnn", choices=list(WORKS))
    parser.add_argument("--fetching", default="waits,computes", metavar="KIND,...")
    every = f"ddp-{READERS},manyhands-{READERS},ddp-0,manyhands-0"
    parser.add_argument("--contestants", default=every, metavar="NAME,...")
    asked = parser.parse_args()
    work = WORKS[asked.only]
    steps = max(10, work.steps // 2) if asked.quick else work.steps
    quickly = measure("ddp-0", asked.only, steps, "waits", 0.0)
    step_s = work.batch / quickly
    record_s = step_s / (work.batch // WORKERS)
    console.print(f"a step takes {step_s * 1e3:.0f} ms, so a record takes {record_s * 1e3:.2f} ms")
    samples: rows.Samples = {}
    for kind in asked.fetching.split(","):
        for round in range(rows.rounds_of(asked)):
            for contestant in asked.contestants.split(","):
                found = measure(contestant, asked.only, steps, kind, record_s)
                samples.setdefault((kind, contestant, "samples_per_s"), []).append(found)
                console.print(f"{kind} round {round + 1}  {contestant:<13} {found:.0f} samples/s")
    rows.report(rows.summarise(samples, reference), METRICS, TARGETS, asked.json)


if __name__ == "__main__":
    main()
