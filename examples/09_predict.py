# SPDX-License-Identifier: Apache-2.0
"""From a click log to predictions: prepared, trained, and what the model says of a test file.

The test file has no label, a user that training never saw and a line that is broken. From the
command line:

manyhands prepare clicks.csv --label clicked --id id --to data
manyhands train task.py --to run
manyhands predict run test.csv --to out.csv --keep user
"""

import random
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torchmetrics.classification import BinaryAUROC

import manyhands as mh


def write_log(path: Path, records: int, seed: int, *, label: bool) -> None:
    draw = random.Random(seed)
    lines = ["id,user,age,hour" + ",clicked" * label]
    for k in range(records):
        user, age, hour = draw.randrange(50), draw.randrange(18, 80), draw.randrange(24)
        clicked = draw.random() < (0.8 if user % 3 == 0 or age > 60 else 0.2)
        lines.append(f"{k},u{user},{age},{hour}" + (",yes" if clicked else ",no") * label)
    path.write_text("\n".join(lines) + "\n")


class Clicks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(60, 8)
        self.layers = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        numbers = torch.stack([batch["age"], batch["hour"]], dim=1)
        return self.layers(torch.cat([self.user(batch["user"]), numbers], dim=1)).squeeze(1)


def main(folder: Path = Path("clicks-example")) -> None:
    folder.mkdir(exist_ok=True)
    write_log(folder / "clicks.csv", 2000, seed=1, label=True)
    write_log(folder / "test.csv", 200, seed=2, label=False)
    with (folder / "test.csv").open("a") as file:
        file.write("200,a stranger,30,12\n201,u7,old,12\n")
    how = {"user": "vocabulary", "age": "standard", "hour": "standard"}
    mh.prepare(folder / "clicks.csv", folder / "data", label="clicked", id="id", encode=how)

    task = mh.Task(
        model=Clicks,
        loss=lambda m, b: F.binary_cross_entropy_with_logits(m(b), b["clicked"].float()),
        optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2),
        data=folder / "data",
        predict=lambda m, b: (m(b), b["clicked"]),  # as for scores; test files need no label
        scores={"auroc": BinaryAUROC()},
    )
    settings = ["train.batch=100", "train.epochs=5"]
    report = mh.train(task, to=folder / "run", workers=2, settings=settings, quiet=True)
    print(f"AUROC {report.scores['auroc']:.3f} on records that were held out")

    found = mh.predict(report.run, folder / "test.csv", task=task, to=folder / "out.csv")
    print(f"{found.records} predictions, {found.bad} without: {found.examples}")
    print(found.to_pandas().tail(3))
    model, encode = mh.load(report.run, task), mh.encoders(report.run, task)
    logit = model(encode([{"user": "u3", "age": 25, "hour": 20}]))
    print(f"u3 clicks with probability {torch.sigmoid(logit).item():.2f}")


if __name__ == "__main__":
    main()
