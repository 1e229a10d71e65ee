# SPDX-License-Identifier: Apache-2.0
"""Training from Python: a callback on the way, the report and the trained model at the end.

python examples/02_python.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import manyhands as mh
from manyhands.values.events import Stepped


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def accuracy(predictions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (predictions.argmax(1) == targets).float().mean()


def show(step: Stepped) -> None:
    if step.step % 20 == 0:
        print(f"step {step.step}: loss {step.loss:.4f}")


def main() -> None:
    digits = load_digits()
    pixels = torch.tensor(digits.data, dtype=torch.float32) / 16
    task = mh.Task(
        model=build,
        loss=lambda model, batch: F.cross_entropy(model(batch["pixels"]), batch["label"]),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        data={"pixels": pixels, "label": digits.target},
        held_out=0.2,
        predict=lambda model, batch: (model(batch["pixels"]), batch["label"]),
        scores={"accuracy": accuracy},
    )
    report = mh.train(
        task,
        workers=2,
        settings=["train.batch=64", "train.epochs=5"],
        on_step=show,
        quiet=True,
    )
    print(f"accuracy {report.scores['accuracy']:.4f} after {report.seconds:.1f} s")
    print(f"fingerprint {report.fingerprint}")

    model = report.load_into(build()).eval()
    print("the first digits are", model(pixels[:8]).argmax(1).tolist())


if __name__ == "__main__":
    main()
