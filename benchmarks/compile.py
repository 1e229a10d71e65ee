# SPDX-License-Identifier: Apache-2.0
"""Compiled models: `train.compile` beside DDP under torchrun with gloo that compiles; two workers
of one thread.

    python benchmarks/compile.py [--quick] [--only mlp,gpt] [--rounds 3] [--json FILE]

    ddp-compiled         model.compile() inside DDP, AdamW(fused=True)
    ddp-compiled-whole   torch.compile of DDP with the model in it
    manyhands-compiled   `manyhands train --set train.compile=true`, one micro-batch per worker
    ddp, manyhands       the same without the compiler, for orientation

samples/s is of the steady state: the first tenth of the steps, in which everybody compiles, is not
counted. Each contestant has an inductor cache of its own, empty at first and kept for the rounds,
so that nobody profits from another. Ratios are to the faster of the two DDPs that compile.
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path

import clock
import commands
import rows
from data_parallel import manyhands, names_of, torchrun
from rows import Metric, Wanted, console
from works import WORKERS, WORKS

METRICS = (Metric("samples_per_s", "samples/s"),)
MEASURED = ("mlp", "gpt", "cnn")
TARGETS = {(work, "samples_per_s"): Wanted("≥", 1.0) for work in MEASURED}
OURS = "manyhands-compiled"
THEIRS = ("ddp-compiled", "ddp-compiled-whole")

CONTESTANTS = {
    "ddp-compiled": torchrun("--fused", "--compile", "inside"),
    "ddp-compiled-whole": torchrun("--fused", "--compile", "whole"),
    OURS: manyhands(WORKERS, "train.compile=true"),
    "ddp": torchrun("--fused"),
    "manyhands": manyhands(WORKERS),
}


def measure(contestant: str, name: str, steps: int, caches: Path, timeout_s: float) -> float:
    """Samples a second, in the steady state."""
    work = WORKS[name]
    with tempfile.TemporaryDirectory() as scratch:
        times = Path(scratch) / "times"
        times.mkdir()
        variables = {
            "BENCHMARK_WORK": name,
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(caches / contestant),
            clock.STEPS: str(steps),
            clock.FOLDER: str(times),
        }
        line = CONTESTANTS[contestant](name, work, steps, Path(scratch) / "saved")
        commands.run(line, variables=variables, timeout_s=timeout_s)
        ended = clock.step_times(times, WORKERS)
    warm = max(2, steps // 10)
    return (steps - warm) * work.batch / (ended[-1] - ended[warm - 1])


def reference(metric: str, values: Mapping[str, float]) -> float | None:
    return max((values[c] for c in THEIRS if c in values), default=None)


def main() -> None:
    parser = rows.arguments(__doc__)
    parser.add_argument("--only", type=names_of(WORKS), default=list(MEASURED), metavar="WORK,...")
    parser.add_argument(
        "--contestants", type=names_of(CONTESTANTS), default=list(CONTESTANTS), metavar="NAME,..."
    )
    parser.add_argument("--timeout-s", type=float, default=600, help="for each command")
    asked = parser.parse_args()
    samples: rows.Samples = {}
    with tempfile.TemporaryDirectory() as caches:
        for name in asked.only:
            steps = max(6, WORKS[name].steps // 5) if asked.quick else WORKS[name].steps
            for round in range(rows.rounds_of(asked)):
                for contestant in asked.contestants:
                    found = measure(contestant, name, steps, Path(caches), asked.timeout_s)
                    samples.setdefault((name, contestant, "samples_per_s"), []).append(found)
                    told = f"{name} round {round + 1}  {contestant:<18}"
                    console.print(f"{told} {METRICS[0].show(found)} samples/s")
    summary = rows.summarise(samples, reference)
    rows.report(summary, METRICS, TARGETS, asked.json, ours=OURS)


if __name__ == "__main__":
    main()
