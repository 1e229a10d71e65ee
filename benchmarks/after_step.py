# SPDX-License-Identifier: Apache-2.0
"""What comes after a step, and what it costs: an MLP with and without it, on two workers.

    python benchmarks/after_step.py [--quick] [--only mlp] [--rounds 5] [--json FILE]

    ema            train.ema = 0.999
    clip           an after_step that clips every weight

Processes differ from each other by more than what is looked for. So each run does it for ten steps,
leaves it out for ten, and so on; compared are the median times of both kinds of steps in the same
run (without the first of each ten). Every run is a real command: fused AdamW, one micro-batch per
worker.
"""

import statistics
import sys
import tempfile
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import clock
import commands
import rows
from in_turns import TURN, left_out
from rows import Metric, Wanted, console
from works import WORKERS, WORKS

HERE = Path(__file__).parent
METRICS = (Metric("step_ms", "step ms", digits=3),)
TARGETS = {(kind, "step_ms"): Wanted("≤", 1.03) for kind in ("ema", "clip")}


def measure(kind: str, name: str, steps: int, timeout_s: float) -> dict[str, float]:
    """Milliseconds a step took "with" and "without" it."""
    work = WORKS[name]
    settings = [f"train.batch={work.batch}", f"train.micro_batch={work.per_worker}"]
    settings += [f"train.steps={steps}", *["train.ema=0.999"] * (kind == "ema")]
    with tempfile.TemporaryDirectory() as scratch:
        times = Path(scratch) / "times"
        times.mkdir()
        command = [sys.executable, "-m", "manyhands", "train"]
        command += [str(HERE / "manyhands_contestant.py"), "--quiet", "--workers", str(WORKERS)]
        command += ["--to", str(Path(scratch) / "saved")]
        command += [word for given in settings for word in ("--set", given)]
        variables = {"BENCHMARK_WORK": name, clock.STEPS: str(steps), clock.FOLDER: str(times)}
        variables["BENCHMARK_AFTER"] = kind
        commands.run(command, variables=variables, timeout_s=timeout_s)
        ended = clock.step_times(times, WORKERS)
    found: dict[str, list[float]] = {"with": [], "without": []}
    for step, (before, after) in enumerate(pairwise(ended), start=1):
        if step >= 2 * TURN and step % TURN:
            found["without" if left_out(step) else "with"].append(after - before)
    return {which: 1000 * statistics.median(took) for which, took in found.items()}


def reference(metric: str, values: Mapping[str, float]) -> float | None:
    return values.get("without")


def main() -> None:
    parser = rows.arguments(__doc__, rounds=5)
    parser.add_argument("--only", default="mlp", metavar="WORK", choices=list(WORKS))
    parser.add_argument("--timeout-s", type=float, default=600, help="for each command")
    asked = parser.parse_args()
    samples: rows.Samples = {}
    steps = max(20, WORKS[asked.only].steps // 5) if asked.quick else WORKS[asked.only].steps
    for round in range(rows.rounds_of(asked)):
        for kind in ("ema", "clip"):
            found = measure(kind, asked.only, steps, asked.timeout_s)
            for which, value in found.items():
                samples.setdefault((kind, which, "step_ms"), []).append(value)
            ratio = found["with"] / found["without"]
            console.print(f"round {round + 1}  {kind:<5} {found['with']:.3f} ms  {ratio:.3f}×")
    rows.report(rows.summarise(samples, reference), METRICS, TARGETS, asked.json, ours="with")


if __name__ == "__main__":
    main()
