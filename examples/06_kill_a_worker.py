# SPDX-License-Identifier: Apache-2.0
"""A worker is killed in the middle of a step, and the weights are those of a calm run.

A fault plan says who is struck, how and when: here rank 1 gets `kill -9` in step 30, while it
updates its part of the weights. The others finish the step without it, a replacement joins, and
the ledger proves that every record was consumed exactly once an epoch all the same.

python examples/06_kill_a_worker.py
"""

import json
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import manyhands as mh
from manyhands.accounting import ledger
from manyhands.accounting.proof import check
from manyhands.values.planned_faults import FaultPlan

SETTINGS = ["train.batch=64", "train.micro_batch=8", "train.epochs=6"]


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))


def make_task() -> mh.Task:
    digits = load_digits()
    pixels = torch.tensor(digits.data, dtype=torch.float32) / 16
    return mh.Task(
        model=build,
        loss=lambda model, batch: F.cross_entropy(model(batch["pixels"]), batch["label"]),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
        data={"pixels": pixels, "label": digits.target},
    )


def main() -> None:
    task = make_task()
    faults = FaultPlan().kill(rank=1, at_step=30, at="update")
    rough = mh.train(task, workers=2, settings=SETTINGS, faults=faults, quiet=True)
    calm = mh.train(task, workers=1, settings=SETTINGS, quiet=True)

    verdict = json.loads((Path(rough.run) / "verdict.json").read_text())
    print(f"rank {verdict['rank']} was lost in step {verdict['step']}: {verdict['what']}")
    print(f"after {verdict['seconds']:.2f} s training went on at step {verdict['went_on_at']}")

    print(f"two workers, one killed  {rough.fingerprint}")
    print(f"one calm worker          {calm.fingerprint}")
    assert rough.recoveries == 1 and calm.recoveries == 0
    assert rough.fingerprint == calm.fingerprint

    proof = check(ledger.read(Path(rough.run) / "ledger.jsonl"))
    assert proof.ok, proof.problems
    for epoch in proof.epochs:
        print(f"epoch {epoch.epoch + 1}: {epoch.consumed} of {epoch.of} records, each once")
    for worker, did in proof.by_worker.items():
        print(f"worker {worker} computed {did.micro_batches} micro-batches")


if __name__ == "__main__":
    main()
