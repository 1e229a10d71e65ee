# SPDX-License-Identifier: Apache-2.0
"""What train.portable costs: `python benchmarks/portable.py`.

A step (forward, backward, AdamW) of the benchmarks' MLP, CNN and GPT, one thread, without manyhands
around it. Contestants: torch as it is; the three variables that fix torch, oneDNN and MKL; and
train.portable, which fixes more and replaces slow products. Each is a process of its own, because
libraries choose their kernels once. They take turns; processor time of the best step of a round.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch.optim import AdamW

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.works import WORKS
from manyhands.training.compute.kernel_marks import fix_kernels
from manyhands.values.environment import PORTABLE, variables

CONTESTANTS = ("default", "variables", "portable")


def seconds(name: str, contestant: str, steps: int) -> float:
    """Of the fastest step."""
    torch.set_num_threads(1)
    if contestant == "portable":
        fix_kernels()
    work = WORKS[name]
    torch.manual_seed(0)
    model = work.model()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    batch = {key: value[: work.per_worker] for key, value in work.data().items()}
    best = float("inf")
    for _ in range(steps):
        start = time.process_time()
        optimizer.zero_grad()
        work.loss(model, batch).backward()
        optimizer.step()
        best = min(best, time.process_time() - start)
    return best


def asked(name: str, contestant: str, steps: int) -> float:
    with variables(PORTABLE if contestant != "default" else {}):
        done = subprocess.run(
            [sys.executable, __file__, "--measure", name, contestant, "--steps", str(steps)],
            capture_output=True,
            text=True,
            timeout=600,
            check=True,
        )
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--measure", nargs=2, metavar=("WORK", "CONTESTANT"))
    asked_for = parser.parse_args()
    if asked_for.measure:
        print(seconds(*asked_for.measure, asked_for.steps))
        return
    for name in ("mlp", "cnn", "gpt"):
        for _ in range(asked_for.rounds):
            took = {c: asked(name, c, asked_for.steps) for c in CONTESTANTS}
            ratios = "  ".join(f"{c} {took[c] / took['default']:.2f}" for c in CONTESTANTS[1:])
            print(f"{name}: default {took['default'] * 1e3:.1f} ms; times as long: {ratios}")


if __name__ == "__main__":
    main()
