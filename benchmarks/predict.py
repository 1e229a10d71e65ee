# SPDX-License-Identifier: Apache-2.0
"""`mh.predict` beside a bare torch loop over Arrow batches, with the same model and the same files.

    python benchmarks/predict.py [--quick] [--only mlp,clicks,csv] [--rounds 3] [--json FILE]

mlp: 32 numbers, scaled, into two layers of 256. clicks: 4 categories of 1,000 values each and 4
numbers, into embeddings and a layer of 64. csv: the records of mlp as CSV. The others are Parquet.
Both read the raw file in one process with one thread, encode, predict in batches of 4,096 and write
Parquet. The loop is what one would write by hand: it knows the types, checks nothing, and would
stop at the first bad record. Ratios are to it.
"""

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import rows
import torch
from pyarrow import csv
from rows import Metric, Samples, Wanted, console
from torch import Tensor, nn
from torch.nn import functional as F

import manyhands as mh

BATCH = 4096
METRICS = (Metric("records_per_s", "records/s"),)
WORKS = ("mlp", "clicks", "csv")
TARGETS = {(work, "records_per_s"): Wanted("≥", 0.8) for work in WORKS}
NUMBERS = [f"x{k}" for k in range(32)]
KINDS, FEW = [f"c{k}" for k in range(4)], [f"x{k}" for k in range(4)]


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1)
        )

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.layers(batch["x"]).squeeze(1)


class Clicks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kinds = nn.ModuleDict({name: nn.Embedding(1100, 16) for name in KINDS})
        self.layers = nn.Sequential(nn.Linear(68, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        parts = [self.kinds[name](batch[name]) for name in KINDS]
        return self.layers(torch.cat([*parts, batch["x"]], dim=1)).squeeze(1)


def table_of(work: str, records: int, seed: int) -> pa.Table:
    draw = np.random.default_rng(seed)
    columns: dict[str, Any] = {}
    if work == "clicks":
        for name in KINDS:
            columns[name] = pa.array([f"v{k}" for k in range(1000)]).take(
                pa.array(draw.integers(0, 1000, records))
            )
    for name in FEW if work == "clicks" else NUMBERS:
        columns[name] = pa.array(draw.normal(3, 2, records).round(4))
    label = np.where(draw.random(records) < 0.5, "yes", "no")
    return pa.table({**columns, "label": pa.array(label)})


def task_of(work: str, data: Path) -> mh.Task:
    return mh.Task(
        model=Clicks if work == "clicks" else Mlp,
        loss=lambda m, b: F.binary_cross_entropy_with_logits(m(b), b["label"].float()),
        optimizer=lambda m: torch.optim.AdamW(m.parameters()),
        data=mh.prepared(data, stack={"x": FEW if work == "clicks" else NUMBERS}),
        predict=lambda m, b: (m(b), b["label"]),
    )


def trained(work: str, folder: Path) -> tuple[Path, mh.Task, nn.Module]:
    """A run, its task, and the model by itself."""
    pq.write_table(table_of(work, 20_000, 1), folder / "train.parquet")
    numbers = FEW if work == "clicks" else NUMBERS
    how = dict.fromkeys(numbers, "standard") | (
        dict.fromkeys(KINDS, "vocabulary") if work == "clicks" else {}
    )
    mh.prepare(folder / "train.parquet", folder / "data", label="label", encode=how)
    task = task_of(work, folder / "data")
    settings = ["train.batch=1024", "train.steps=5", "data.readers=0"]
    mh.train(task, to=folder / "run", workers=1, settings=settings, quiet=True)
    return folder / "run", task, mh.load(folder / "run", task)


def batches_of(path: Path) -> Iterator[pa.RecordBatch]:
    if path.suffix == ".parquet":
        return pq.ParquetFile(path).iter_batches(BATCH)
    return iter(csv.open_csv(path, csv.ReadOptions(use_threads=False)))


def bare(work: str, model: nn.Module, encoders: Any, source: Path, to: Path) -> None:
    """The loop that one writes by hand."""
    fitted = encoders.fitted.fitted
    numbers = FEW if work == "clicks" else NUMBERS
    center = np.array([fitted[name].center for name in numbers])
    scale = np.array([fitted[name].scale for name in numbers])
    known = {n: pa.array(fitted[n].values) for n in KINDS} if work == "clicks" else {}
    writer: pq.ParquetWriter | None = None
    record = 0
    with torch.no_grad():
        for big in batches_of(source):
            for start in range(0, big.num_rows, BATCH):
                some = big.slice(start, BATCH)
                x = np.stack([some.column(name).to_numpy() for name in numbers], axis=1)
                x = ((x - center) / scale).astype(np.float32)
                batch = {"x": torch.from_numpy(x)}
                for name, values in known.items():
                    places = pc.index_in(some.column(name), value_set=values).fill_null(-2)
                    batch[name] = torch.from_numpy(places.to_numpy().astype(np.int64) + 2)
                likely = torch.sigmoid(model(batch)).numpy()
                names = pa.array(["no", "yes"]).take(pa.array((likely > 0.5).astype(np.int64)))
                count = np.arange(record, record + len(likely))
                table = pa.table({"record": count, "prediction": names, "p_yes": likely})
                record += len(likely)
                writer = writer or pq.ParquetWriter(to, table.schema)
                writer.write_table(table)
    assert writer is not None
    writer.close()


def measure(work: str, folder: Path, records: int, rounds: int, samples: Samples) -> None:
    run, task, model = trained(work, folder)
    encoders = mh.encoders(run, task)
    table = table_of(work, records, 2).drop_columns(["label"])
    source = folder / ("test.csv" if work == "csv" else "test.parquet")
    csv.write_csv(table, source) if work == "csv" else pq.write_table(table, source)
    ours, theirs = folder / "ours.parquet", folder / "theirs.parquet"
    contestants: dict[str, Callable[[], object]] = {
        "bare loop": lambda: bare(work, model, encoders, source, theirs),
        "manyhands": lambda: mh.predict(run, source, task=task, to=ours, batch=BATCH, quiet=True),
    }
    for call in contestants.values():
        call()  # files are in the page cache, kernels are chosen
    both = [pq.read_table(path).column("p_yes").to_numpy() for path in (ours, theirs)]
    assert np.allclose(*both, atol=1e-5), "they say the same"
    for _ in range(rounds):
        for name, call in contestants.items():
            began = time.perf_counter()
            call()
            taken = time.perf_counter() - began
            samples.setdefault((work, name, "records_per_s"), []).append(records / taken)


def reference(metric: str, values: Mapping[str, float]) -> float | None:
    return values.get("bare loop")


def main() -> None:
    parser = rows.arguments(__doc__)
    parser.add_argument(
        "--only", type=lambda t: t.split(","), default=list(WORKS), metavar="WORK,..."
    )
    asked = parser.parse_args()
    torch.set_num_threads(1)
    pa.set_cpu_count(1)
    samples = rows.Samples()
    for work in asked.only:
        with tempfile.TemporaryDirectory(prefix="manyhands-bench-") as folder:
            console.print(f"[dim]{work}[/]")
            records = 50_000 if asked.quick else 500_000
            measure(work, Path(folder), records, rows.rounds_of(asked), samples)
    rows.report(rows.summarise(samples, reference), METRICS, TARGETS, asked.json)


if __name__ == "__main__":
    main()
