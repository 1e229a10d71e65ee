# SPDX-License-Identifier: Apache-2.0
"""What comes after a step, and what it costs: an MLP with and without it, on two workers.

    python benchmarks/after_step.py [--quick] [--only mlp] [--rounds 5] [--json FILE]

    plain          `manyhands train`, fused AdamW, one micro-batch per worker
    ema            the same with train.ema = 0.999
    clip           the same with an after_step that clips every weight

Every contestant is a real command, and they take turns, round by round. Counted is the median time
of a step, which a slow moment of the machine leaves alone. Ratios are to plain.
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
from rows import Metric, Wanted, console
from works import WORKERS, WORKS

HERE = Path(__file__).parent
METRICS = (Metric("step_ms", "step ms", digits=3),)
TARGETS = {("mlp", "step_ms"): Wanted("≤", 1.03)}
CONTESTANTS: dict[str, list[str]] = {"plain": [], "ema": ["train.ema=0.999"], "clip": []}


def measure(contestant: str, name: str, steps: int, timeout_s: float) -> dict[str, float]:
    work = WORKS[name]
    settings = [f"train.batch={work.batch}", f"train.micro_batch={work.per_worker}"]
    settings += [f"train.steps={steps}", *CONTESTANTS[contestant]]
    with tempfile.TemporaryDirectory() as scratch:
        times = Path(scratch) / "times"
        times.mkdir()
        command = [sys.executable, "-m", "manyhands", "train"]
        command += [str(HERE / "manyhands_contestant.py"), "--quiet", "--workers", str(WORKERS)]
        command += ["--to", str(Path(scratch) / "saved")]
        command += [word for given in settings for word in ("--set", given)]
        variables = {"BENCHMARK_WORK": name, clock.STEPS: str(steps), clock.FOLDER: str(times)}
        variables["BENCHMARK_AFTER"] = contestant
        commands.run(command, variables=variables, timeout_s=timeout_s)
        ended = clock.step_times(times, WORKERS)
    apart = [after - before for before, after in pairwise(ended[len(ended) // 10 :])]
    return {"step_ms": 1000 * statistics.median(apart)}


def reference(metric: str, values: Mapping[str, float]) -> float | None:
    return values.get("plain")


def main() -> None:
    parser = rows.arguments(__doc__)
    parser.add_argument("--only", default="mlp", metavar="WORK", choices=list(WORKS))
    parser.add_argument("--timeout-s", type=float, default=600, help="for each command")
    asked = parser.parse_args()
    samples: rows.Samples = {}
    name = asked.only
    steps = max(20, WORKS[name].steps // 5) if asked.quick else WORKS[name].steps
    for round in range(rows.rounds_of(asked)):
        for contestant in CONTESTANTS:
            found = measure(contestant, name, steps, asked.timeout_s)
            for metric, value in found.items():
                samples.setdefault((name, contestant, metric), []).append(value)
            console.print(f"round {round + 1}  {contestant:<6} {found['step_ms']:.3f} ms")
    rows.report(rows.summarise(samples, reference), METRICS, TARGETS, asked.json)


if __name__ == "__main__":
    main()
