# SPDX-License-Identifier: Apache-2.0
"""`--engine ray` beside Ray Train: how soon it trains, and what it needs.

    python benchmarks/engine_ray.py [--quick] [--rounds 3] [--json FILE]

    ray            a private Ray, a placement group for two workers and an empty actor in each:
                   what Ray itself takes
    ray-train      a TorchTrainer with two workers, on the same Ray
    manyhands      `manyhands train --engine ray --workers 2`

Counted are the seconds from the start of the command to the first step that is done on all
workers; the same beyond what Ray itself took, in the same round, to have its actors up; the peak of
all processes' memory; and what a host needs beyond Ray itself, the driver left out on both sides.
Ray Train is left out where it cannot be imported (it wants pandas: pip install 'ray[train]').
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import clock
import commands
import rows
from rows import Metric, Wanted, console

HERE = Path(__file__).parent
WORK, STEPS, LATE_S = "mlp", 300, 300.0
METRICS = (
    Metric("first_step_s", "first step, s", digits=1),
    Metric("after_actors_s", "after actors, s", digits=1),
    Metric("memory_gb", "memory, GB", digits=2),
    Metric("host_gb", "host, above Ray, GB", digits=2),
)
TARGETS = {
    (WORK, "after_actors_s"): Wanted("≤", 3.0, of_ratio=False),
    (WORK, "host_gb"): Wanted("≤", 0.3, of_ratio=False),
}


Found = tuple[float, float, float]
"""Seconds, gigabytes, and gigabytes without the driver."""


def alone() -> Found:
    """Until Ray's actors are up."""
    with tempfile.TemporaryDirectory() as folder:
        noted = Path(folder) / "up"
        script = str(HERE / "ray_peers" / "alone.py")
        ran = commands.run([sys.executable, script, str(noted)], variables={}, timeout_s=LATE_S)
        return _found(ran, float(noted.read_text()))


def training(contestant: str, steps: int) -> Found:
    """Until the first step is done."""
    with tempfile.TemporaryDirectory() as folder:
        times = Path(folder) / "times"
        times.mkdir()
        run = str(Path(folder) / "run")
        if contestant == "ray-train":
            command = [sys.executable, str(HERE / "ray_peers" / "trainer.py"), WORK, run]
        else:
            task = str(HERE / "manyhands_contestant.py")
            command = [sys.executable, "-m", "manyhands", "train", task, "--quiet", "--to", run]
            command += ["--engine", "ray", "--workers", "2"]
            command += ["--set", f"train.steps={steps}", "--set", "train.batch=256"]
            command += ["--set", "train.micro_batch=128"]
        variables = {"BENCHMARK_WORK": WORK, clock.STEPS: str(steps), clock.FOLDER: str(times)}
        ran = commands.run(command, variables=variables, timeout_s=LATE_S)
        return _found(ran, clock.step_times(times, 2)[0])


def _found(ran: commands.Ran, at: float) -> Found:
    return at - ran.started, ran.peak_memory_bytes / 1e9, ran.peak_children_bytes / 1e9


def main() -> None:
    asked = rows.arguments(__doc__).parse_args()
    contestants = ["ray-train", "manyhands"]
    if subprocess.run(
        [sys.executable, "-c", "import ray.train.torch"], capture_output=True
    ).returncode:
        console.print("Ray Train cannot be imported: pip install 'ray[train]'. It is left out.")
        contestants.remove("ray-train")
    samples: rows.Samples = {}
    for _ in range(rows.rounds_of(asked)):
        up_s, all_gb, own_gb = alone()
        console.print(f"ray: its actors are up after {up_s:.1f} s, {all_gb:.2f} GB")
        samples.setdefault((WORK, "ray", "memory_gb"), []).append(all_gb)
        for contestant in contestants:
            first_s, memory_gb, host_gb = training(contestant, 40 if asked.quick else STEPS)
            found = {
                "first_step_s": first_s,
                "after_actors_s": first_s - up_s,
                "memory_gb": memory_gb,
                "host_gb": host_gb - own_gb,
            }
            for metric, value in found.items():
                samples.setdefault((WORK, contestant, metric), []).append(value)
            console.print(f"{contestant}: first step after {first_s:.1f} s, {memory_gb:.2f} GB")
    table = rows.summarise(samples, lambda metric, values: values.get("ray-train"))
    rows.report(table, METRICS, TARGETS, asked.json)


if __name__ == "__main__":
    main()
