# SPDX-License-Identifier: Apache-2.0
"""Train a work in 16 micro-batches with two workers, one of them perhaps at half speed.

    BENCHMARK_WORK=mlp python unequal_run.py RUN STEPS [--slow] [--fixed]

`--slow` has every micro-batch of rank 1 take twice as long; `--fixed` keeps the deal as it was.
"""

import argparse
import os
from pathlib import Path

from works import WORKERS, WORKS

import manyhands as mh
from manyhands.values.planned_faults import FaultPlan

MICRO_BATCHES = 16
TASK = Path(__file__).parents[1] / "manyhands_contestant.py"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run")
    parser.add_argument("steps", type=int)
    parser.add_argument("--slow", action="store_true")
    parser.add_argument("--fixed", action="store_true")
    asked = parser.parse_args()
    batch = WORKS[os.environ["BENCHMARK_WORK"]].batch
    settings = [f"train.batch={batch}", f"train.micro_batch={batch // MICRO_BATCHES}"]
    settings += [f"train.steps={asked.steps}"]
    settings += ["recovery.rebalance=false"] if asked.fixed else []
    faults = FaultPlan().slow(rank=1, at_step=0, times=2.0) if asked.slow else None
    mh.train(TASK, to=asked.run, workers=WORKERS, settings=settings, faults=faults, quiet=True)


if __name__ == "__main__":
    main()
