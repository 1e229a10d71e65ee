# SPDX-License-Identifier: Apache-2.0
"""From raw records to a trained model: a CSV is prepared, and a model learns from its shards.

`mh.prepare` finds out what the columns are, splits the records so that nothing leaks, fits encoders
on the training records and writes shuffled shards. The same from the command line:

manyhands prepare wine.csv --label kind --to data/wine
manyhands data data/wine
"""

import csv
from pathlib import Path

import torch
from sklearn.datasets import load_wine
from torch import nn
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy

import manyhands as mh


def write_csv(path: Path) -> list[str]:
    """Raw records, as they come: numbers, a label in words, a value missing here and there."""
    wine = load_wine()
    names = [name.replace("/", "_") for name in wine.feature_names]
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*names, "kind"])
        for k, (row, target) in enumerate(zip(wine.data, wine.target, strict=True)):
            values = ["" if (k + column) % 40 == 0 else v for column, v in enumerate(row)]
            writer.writerow([*values, wine.target_names[target]])
    return names


def main(folder: Path = Path("wine-example")) -> None:
    folder.mkdir(exist_ok=True)
    names = write_csv(folder / "wine.csv")
    made = mh.prepare([folder / "wine.csv"], folder / "data", label="kind", split="ratio=0.75")
    rows = {name: split.rows for name, split in made.splits.items()}
    print(f"prepared {rows}, shared between splits: {made.leakage}")

    task = mh.Task(
        model=lambda: nn.Sequential(nn.Linear(len(names), 32), nn.ReLU(), nn.Linear(32, 3)),
        loss=lambda model, batch: F.cross_entropy(model(batch["x"]), batch["kind"]),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
        data=mh.prepared(folder / "data", stack={"x": names}),  # its split "test" is held out
        predict=lambda model, batch: (model(batch["x"]), batch["kind"]),
        scores={"accuracy": MulticlassAccuracy(3, average="micro")},
    )
    settings = ["train.batch=32", "train.epochs=20"]
    report = mh.train(task, to=folder / "run", workers=2, settings=settings, quiet=True)
    print(f"accuracy {report.scores['accuracy']:.3f} on {rows['test']} wines it has never seen")


if __name__ == "__main__":
    main()
