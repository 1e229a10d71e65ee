# SPDX-License-Identifier: Apache-2.0
"""A moving average of the weights, beside them: kept, scored and loaded.

python examples/08_ema.py
"""

from pathlib import Path

import torch
from safetensors.torch import load_model
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import manyhands as mh


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def accuracy(predictions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (predictions.argmax(1) == targets).float().mean()


def main() -> None:
    digits = load_digits()
    pixels = torch.tensor(digits.data, dtype=torch.float32) / 16
    task = mh.Task(
        model=build,
        loss=lambda model, batch: F.cross_entropy(model(batch["pixels"]), batch["label"]),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9),
        data={"pixels": pixels, "label": digits.target},
        held_out=0.2,
        predict=lambda model, batch: (model(batch["pixels"]), batch["label"]),
        scores={"accuracy": accuracy},
    )
    report = mh.train(
        task,
        workers=2,
        settings=["train.batch=64", "train.epochs=5", "train.ema=0.98", "evaluate.weights=ema"],
        quiet=True,
    )
    trained = mh.evaluate(report.run, task, weights="trained")
    print(f"accuracy of the average {report.scores['accuracy']:.4f}")
    print(f"accuracy of the trained weights {trained['accuracy']:.4f}")
    print(f"fingerprint of the average {mh.fingerprint(report.run, weights='ema')}")

    # Beside the trained weights, under the same names.
    model = build().eval()
    load_model(model, Path(report.weights).with_name("ema.safetensors"))
    print("the first digits are", model(pixels[:8]).argmax(1).tolist())


if __name__ == "__main__":
    main()
