# SPDX-License-Identifier: Apache-2.0
"""What others read shuffled batches with. Run as: peers.py NAME make|read|csv FOLDER WORK

`make` turns FOLDER/WORK.arrow into the library's own format. `read` reads it in shuffled batches
of 256, epoch after epoch, for about two seconds after a first epoch that does not count, and prints
records per second as JSON. `csv` turns FOLDER/records.csv into TFRecords and prints the same.
Before what counts, each prints "ready" and waits for a line.

Each follows its library's manual; one process, no worker processes unless the library insists.
"""

import csv
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

BATCH, SECONDS, LONGEST = 256, 2.0, 20

Epoch = Callable[[int], Iterator[int]]
"""Yields the number of records of each batch of an epoch."""

Convert = Callable[[], int]
"""Turns a CSV file into TFRecords; how many."""


def table_of(folder: Path, work: str) -> Any:
    import pyarrow as pa

    return pa.ipc.open_file(pa.memory_map(str(folder / f"{work}.arrow"))).read_all()


def rows_of(folder: Path, work: str) -> Iterable[dict[str, Any]]:
    import numpy as np

    for row in table_of(folder, work).to_pylist():
        if work == "mixed":
            yield {
                "id": row["id"],
                "x": np.asarray(row["x"], dtype=np.float32),
                "tokens": np.asarray(row["tokens"], dtype=np.int64),
                "y": row["y"],
            }
        else:
            yield {"data": row["data"]}


def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Numbers and vectors stacked, tokens padded, bytes as they are."""
    import numpy as np
    import torch

    if "data" in rows[0]:
        return {"data": [r["data"] for r in rows]}
    tokens = [torch.as_tensor(np.asarray(r["tokens"])) for r in rows]
    return {
        "id": torch.as_tensor([int(r["id"]) for r in rows]),
        "x": torch.as_tensor(np.stack([r["x"] for r in rows])),
        "tokens": torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True),
        "y": torch.as_tensor([int(r["y"]) for r in rows]),
    }


def size_of(batch: Any) -> int:
    return len(batch["data" if "data" in batch else "id"])


# ---- whole batches from memory: no library to speak of


class ArrowTake:
    """Whole batches taken from memory-mapped Arrow; the shuffle is a list of numbers."""

    def make(self, folder: Path, work: str) -> None: ...

    def read(self, folder: Path, work: str) -> Epoch:
        import numpy as np

        table = table_of(folder, work).combine_chunks()

        def epoch(number: int) -> Iterator[int]:
            order = np.random.default_rng(number).permutation(table.num_rows)
            for k in range(0, len(order), BATCH):
                batch = table.take(order[k : k + BATCH])
                yield batch.num_rows

        return epoch


class DataLoaderArrow:
    """torch's DataLoader over rows of memory-mapped Arrow."""

    def make(self, folder: Path, work: str) -> None: ...

    def read(self, folder: Path, work: str) -> Epoch:
        from torch.utils.data import DataLoader, Dataset

        table = table_of(folder, work).combine_chunks()
        columns = {name: table.column(name).chunk(0) for name in table.column_names}

        class Rows(Dataset[dict[str, Any]]):
            def __len__(self) -> int:
                return table.num_rows

            def __getitem__(self, index: int) -> dict[str, Any]:
                row: dict[str, Any] = {}
                for name, column in columns.items():
                    value = column[index]
                    lists = name in ("x", "tokens")
                    row[name] = value.values.to_numpy() if lists else value.as_py()
                return row

        loader = DataLoader(Rows(), batch_size=BATCH, shuffle=True, collate_fn=collate)
        return lambda number: (size_of(batch) for batch in loader)


# ---- TFRecords


def _write_tfrecords(rows: Iterable[dict[str, Any]], path: Path) -> int:
    """With TensorFlow's Python API."""
    import tensorflow as tf

    feature, count = tf.train.Feature, 0
    with tf.io.TFRecordWriter(str(path)) as writer:
        for row in rows:
            features: dict[str, Any] = {}
            for name, value in row.items():
                if isinstance(value, bytes):
                    features[name] = feature(bytes_list=tf.train.BytesList(value=[value]))
                elif name == "x":
                    features[name] = feature(float_list=tf.train.FloatList(value=value))
                elif isinstance(value, float):
                    features[name] = feature(float_list=tf.train.FloatList(value=[value]))
                else:
                    many = value if hasattr(value, "__len__") else [value]
                    features[name] = feature(int64_list=tf.train.Int64List(value=many))
            example = tf.train.Example(features=tf.train.Features(feature=features))
            writer.write(example.SerializeToString())
            count += 1
    return count


class TfData:
    def make(self, folder: Path, work: str) -> None:
        _write_tfrecords(rows_of(folder, work), folder / f"{work}.tfrecord")

    def read(self, folder: Path, work: str) -> Epoch:
        import tensorflow as tf

        fixed = tf.io.FixedLenFeature
        if work == "mixed":
            form = {
                "id": fixed([], tf.int64),
                "x": fixed([32], tf.float32),
                "tokens": tf.io.RaggedFeature(tf.int64),
                "y": fixed([], tf.int64),
            }
        else:
            form = {"data": fixed([], tf.string)}
        records = 200_000 if work == "mixed" else 20_000
        data = (
            tf.data.TFRecordDataset(str(folder / f"{work}.tfrecord"))
            .shuffle(records)
            .batch(BATCH)
            .map(lambda raw: tf.io.parse_example(raw, form), num_parallel_calls=1)
            .prefetch(2)
        )

        def epoch(number: int) -> Iterator[int]:
            for batch in data:
                if work == "mixed":
                    batch["tokens"].to_tensor().numpy(), batch["x"].numpy()
                    yield len(batch["id"].numpy())
                else:
                    yield len(batch["data"].numpy())

        return epoch

    def csv(self, folder: Path) -> Convert:
        import tensorflow as tf

        assert tf

        def convert() -> int:
            with (folder / "records.csv").open() as file:
                rows = (
                    {k: (float(v) if k.startswith("x") else int(v)) for k, v in row.items()}
                    for row in csv.DictReader(file)
                )
                return _write_tfrecords(rows, folder / "records-tf.tfrecord")

        return convert


class Tfrecord:
    """The `tfrecord` package."""

    def make(self, folder: Path, work: str) -> None:
        if not (folder / f"{work}.tfrecord").exists():
            TfData().make(folder, work)

    def read(self, folder: Path, work: str) -> Epoch:
        from tfrecord.torch.dataset import TFRecordDataset
        from torch.utils.data import DataLoader

        form = (
            {"id": "int", "x": "float", "tokens": "int", "y": "int"}
            if work == "mixed"
            else {"data": "byte"}
        )
        path = str(folder / f"{work}.tfrecord")
        data = TFRecordDataset(path, None, form, shuffle_queue_size=4096)

        def gather(rows: list[dict[str, Any]]) -> dict[str, Any]:
            if work == "bytes":
                return collate(rows)
            for row in rows:
                row["id"], row["y"] = row["id"][0], row["y"][0]
            return collate(rows)

        loader = DataLoader(data, batch_size=BATCH, collate_fn=gather)
        return lambda number: (size_of(batch) for batch in loader)

    def csv(self, folder: Path) -> Convert:
        from tfrecord.writer import TFRecordWriter

        def convert() -> int:
            writer, count = TFRecordWriter(str(folder / "records-pkg.tfrecord")), 0
            with (folder / "records.csv").open() as file:
                for row in csv.DictReader(file):
                    writer.write(
                        {
                            k: ((float(v), "float") if k.startswith("x") else (int(v), "int"))
                            for k, v in row.items()
                        }
                    )
                    count += 1
            writer.close()
            return count

        return convert


# ---- formats of their own


class LitData:
    def make(self, folder: Path, work: str) -> None:
        from litdata.streaming.writer import BinaryWriter

        (folder / f"{work}.lit").mkdir()
        writer = BinaryWriter(str(folder / f"{work}.lit"), chunk_bytes="64MB")
        for k, row in enumerate(rows_of(folder, work)):
            writer[k] = row
        writer.done()
        writer.merge()

    def read(self, folder: Path, work: str) -> Epoch:
        from litdata import StreamingDataLoader, StreamingDataset

        data = StreamingDataset(str(folder / f"{work}.lit"), shuffle=True)
        loader = StreamingDataLoader(data, batch_size=BATCH, collate_fn=collate)
        return lambda number: (size_of(batch) for batch in loader)


def _without_torchvision() -> None:
    """Streaming imports torchvision, which is not used here and often has no build that fits."""
    from importlib.machinery import ModuleSpec
    from unittest.mock import MagicMock

    for name in ("", ".datasets", ".transforms", ".transforms.functional"):
        module = MagicMock(__spec__=ModuleSpec(f"torchvision{name}", None), __version__="0")
        sys.modules[f"torchvision{name}"] = module
    sys.modules["torchvision.datasets"].VisionDataset = type("VisionDataset", (), {})


class Streaming:
    """MosaicML Streaming."""

    def make(self, folder: Path, work: str) -> None:
        _without_torchvision()
        from streaming import MDSWriter

        mixed = {"id": "int", "x": "ndarray:float32:32", "tokens": "ndarray:int64", "y": "int"}
        columns = mixed if work == "mixed" else {"data": "bytes"}
        with MDSWriter(out=str(folder / f"{work}.mds"), columns=columns) as writer:
            for row in rows_of(folder, work):
                writer.write(row)

    def read(self, folder: Path, work: str) -> Epoch:
        _without_torchvision()
        from streaming import StreamingDataset
        from torch.utils.data import DataLoader

        data = StreamingDataset(local=str(folder / f"{work}.mds"), shuffle=True, batch_size=BATCH)
        loader = DataLoader(data, batch_size=BATCH, collate_fn=collate)
        return lambda number: (size_of(batch) for batch in loader)


class WebDataset:
    def make(self, folder: Path, work: str) -> None:
        import webdataset as wds

        (folder / f"{work}.wds").mkdir()
        with wds.ShardWriter(str(folder / f"{work}.wds" / "%04d.tar"), maxcount=20_000) as writer:
            for k, row in enumerate(rows_of(folder, work)):
                if work == "bytes":
                    writer.write({"__key__": f"{k:08}", "data.bin": row["data"]})
                else:
                    arrays = {"x.npy": row["x"], "tokens.npy": row["tokens"]}
                    writer.write({"__key__": f"{k:08}", "y.cls": row["y"], **arrays})

    def read(self, folder: Path, work: str) -> Epoch:
        import webdataset as wds

        shards = sorted(str(p) for p in (folder / f"{work}.wds").glob("*.tar"))
        data = wds.WebDataset(shards, shardshuffle=len(shards), empty_check=False).shuffle(5000)
        data = data.decode() if work == "mixed" else data

        def gather(rows: list[dict[str, Any]]) -> dict[str, Any]:
            if work == "bytes":
                return {"data": [r["data.bin"] for r in rows]}
            named = [
                {
                    "id": int(r["__key__"]),
                    "x": r["x.npy"],
                    "tokens": r["tokens.npy"],
                    "y": r["y.cls"],
                }
                for r in rows
            ]
            return collate(named)

        batched = data.batched(BATCH, collation_fn=gather)
        return lambda number: (size_of(batch) for batch in batched)


class RayData:
    def make(self, folder: Path, work: str) -> None:
        import pyarrow.parquet as pq

        (folder / f"{work}.parquet").mkdir()
        pq.write_table(table_of(folder, work), folder / f"{work}.parquet" / "0.parquet")

    def _start(self) -> Any:
        os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_DATA_DISABLE_PROGRESS_BARS="1")
        import ray

        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
        ray.data.DataContext.get_current().enable_progress_bars = False
        return ray

    def read(self, folder: Path, work: str) -> Epoch:
        ray = self._start()
        data = ray.data.read_parquet(str(folder / f"{work}.parquet"))

        def epoch(number: int) -> Iterator[int]:
            batches = data.iter_batches(
                batch_size=BATCH, batch_format="numpy", local_shuffle_buffer_size=20_000
            )
            for batch in batches:
                yield len(batch["data" if work == "bytes" else "id"])

        return epoch

    def csv(self, folder: Path) -> Convert:
        ray = self._start()

        def convert() -> int:
            data = ray.data.read_csv(str(folder / "records.csv"))
            data.write_tfrecords(str(folder / "records-ray"))
            return data.count()

        return convert


PEERS: dict[str, Any] = {
    "arrow-take": ArrowTake,
    "tf.data": TfData,
    "litdata": LitData,
    "ray-data": RayData,
    "dataloader-arrow": DataLoaderArrow,
    "tfrecord": Tfrecord,
    "streaming": Streaming,
    "webdataset": WebDataset,
}
NEEDS = {
    "arrow-take": "pyarrow",
    "tf.data": "tensorflow",
    "litdata": "litdata",
    "ray-data": "ray",
    "dataloader-arrow": "torch",
    "tfrecord": "tfrecord",
    "streaming": "streaming",
    "webdataset": "webdataset",
}


def speed(epoch: Epoch, limit_s: float = 15.0) -> float:
    """Records per second after a first epoch (or `limit_s / 3` of one) that does not count."""
    began = time.perf_counter()
    for _ in epoch(0):
        if time.perf_counter() - began > limit_s / 3:
            break
    wait()
    records, began = 0, time.perf_counter()
    for number in itertools.count(1):
        for size in epoch(number):
            records += size
            if time.perf_counter() - began > limit_s:
                break
        if (took := time.perf_counter() - began) > SECONDS:
            return records / took
    raise AssertionError


def main(peers: dict[str, Any]) -> None:
    name, what, folder, *work = sys.argv[1:]
    peer = peers[name]()
    if what == "make":
        peer.make(Path(folder), work[0])
        answer(0)
    elif what == "read":
        answer(speed(peer.read(Path(folder), work[0])))
    else:
        convert = peer.csv(Path(folder))
        wait()
        began = time.perf_counter()
        count = convert()
        answer(count / (time.perf_counter() - began))


def wait() -> None:
    """Until the benchmark says so: contestants begin together, or one after the other."""
    print("ready", flush=True)
    sys.stdin.readline()


def answer(records_per_s: float) -> None:
    print(json.dumps({"records_per_s": records_per_s}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(PEERS)
