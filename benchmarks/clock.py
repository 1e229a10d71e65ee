# SPDX-License-Identifier: Apache-2.0
"""When each optimizer step ended: noted inside the workers, read by the benchmark.

Every contestant calls `Clock.step` right after its optimizer's step, on every worker, so all are
timed at the same point by the same code. The benchmark says through the environment how many steps
there will be and into which folder each worker writes its times.
"""

import json
import os
import time
from pathlib import Path

STEPS, FOLDER = "BENCHMARK_STEPS", "BENCHMARK_TIMES"


class Clock:
    """To manyhands this is a learning-rate schedule that leaves the learning rate alone."""

    def __init__(self) -> None:
        self.steps, self.folder = int(os.environ[STEPS]), Path(os.environ[FOLDER])
        self.times: list[float] = []

    def step(self) -> None:
        self.times.append(time.time())
        if len(self.times) == self.steps:
            (self.folder / f"{os.getpid()}.json").write_text(json.dumps(self.times))


def step_times(folder: Path, workers: int) -> list[float]:
    """When each step was done on the last of the workers, in seconds since the epoch."""
    noted = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    if len(noted) != workers:
        raise RuntimeError(f"{len(noted)} of {workers} workers wrote down their times.")
    return [max(times) for times in zip(*noted, strict=True)]
