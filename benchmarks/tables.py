# SPDX-License-Identifier: Apache-2.0
"""Wide & deep on tables of rows: a plain loop of torch with sparse gradients, and ours.

    python benchmarks/tables.py [--quick] [--only movielens,million] [--rounds 3] [--json FILE]

Every contestant is a real command, started anew for every measurement; within a work they take
turns, round by round, so that a slow minute of the machine hits all of them.

    plain          one process, nn.Embedding(sparse=True), Adagrad and Adam, torch's own threads
    plain-1        the same with one thread
    manyhands      `manyhands train`, two workers of one thread, one micro-batch per worker
    manyhands-m8   the same batch in 8 micro-batches

    movielens      the model of examples/24_recommender.py on its ratings, or on made-up ones
    million        the same model; people, films and pairs are drawn from a million ids, some much
                   more often than others

samples/s is of the steady state: the first tenth of the steps is not counted. Ratios are to the
faster of the plain loops, and to `plain` otherwise.
"""

import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import clock
import commands
import rows
from data_parallel import names_of
from rows import Metric, Wanted, console
from tables_work import BATCH, STEPS

HERE = Path(__file__).parent
WORKERS = 2

METRICS = (
    Metric("samples_per_s", "samples/s"),
    Metric("startup_s", "start-up s", digits=2),
    Metric("peak_memory_mb", "memory MB"),
)
TARGETS = {
    ("movielens", "samples_per_s"): Wanted("≥", 1.5),
    ("million", "samples_per_s"): Wanted("≥", 3.0),
}

Command = Callable[[str, int, Path], list[str]]
"""(name of the work, steps, where to save) → the command line."""


def plain(*flags: str) -> Command:
    def command(name: str, steps: int, to: Path) -> list[str]:
        script = str(HERE / "plain_tables_contestant.py")
        return [sys.executable, script, name, "--to", str(to), *flags]

    return command


def manyhands(micro_batches: int) -> Command:
    def command(name: str, steps: int, to: Path) -> list[str]:
        settings = [
            f"train.batch={BATCH}",
            f"train.micro_batch={BATCH // micro_batches}",
            f"train.steps={steps}",
        ]
        train = ["-m", "manyhands", "train", str(HERE / "tables_contestant.py"), "--quiet"]
        train += ["--workers", str(WORKERS), "--to", str(to), "--param", f"work={name}"]
        train += [word for setting in settings for word in ("--set", setting)]
        return [sys.executable, *train]

    return command


CONTESTANTS = {
    "plain": plain(),
    "plain-1": plain("--threads", "1"),
    "manyhands": manyhands(WORKERS),
    "manyhands-m8": manyhands(8),
}


def measure(contestant: str, name: str, steps: int, timeout_s: float) -> dict[str, float]:
    """Run one contestant once; metric → value."""
    with tempfile.TemporaryDirectory() as scratch:
        times = Path(scratch) / "times"
        times.mkdir()
        command = CONTESTANTS[contestant](name, steps, Path(scratch) / "saved")
        variables = {clock.STEPS: str(steps), clock.FOLDER: str(times)}
        ran = commands.run(command, variables=variables, timeout_s=timeout_s)
        ended = clock.step_times(times, 1 if contestant.startswith("plain") else WORKERS)
    warm = max(1, steps // 10)
    return {
        "samples_per_s": (steps - warm) * BATCH / (ended[-1] - ended[warm - 1]),
        "startup_s": ended[0] - ran.started,
        "peak_memory_mb": ran.peak_memory_bytes / 1e6,
    }


def reference(metric: str, values: Mapping[str, float]) -> float | None:
    if metric == "samples_per_s":
        return max((values[c] for c in ("plain", "plain-1") if c in values), default=None)
    return values.get("plain")


def main() -> None:
    parser = rows.arguments(__doc__)
    parser.add_argument("--only", type=names_of(STEPS), default=list(STEPS), metavar="WORK,...")
    parser.add_argument(
        "--contestants", type=names_of(CONTESTANTS), default=list(CONTESTANTS), metavar="NAME,..."
    )
    parser.add_argument("--timeout-s", type=float, default=600, help="for each command")
    asked = parser.parse_args()
    samples: rows.Samples = {}
    for name in asked.only:
        steps = STEPS[name] // 5 if asked.quick else STEPS[name]
        for round in range(rows.rounds_of(asked)):
            for contestant in asked.contestants:
                found = measure(contestant, name, steps, asked.timeout_s)
                for metric, value in found.items():
                    samples.setdefault((name, contestant, metric), []).append(value)
                told = "  ".join(f"{m.title} {m.show(found[m.name])}" for m in METRICS)
                console.print(f"{name} round {round + 1}  {contestant:<13} {told}")
    rows.report(rows.summarise(samples, reference), METRICS, TARGETS, asked.json)


if __name__ == "__main__":
    main()
