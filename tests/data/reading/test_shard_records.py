"""Prepared folders as records: batches, windows, damage, processes, and training on them."""

import dataclasses
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import manyhands as mh
from manyhands.data.open_data import open_data
from manyhands.data.ordering.epoch_order import RecordVisit
from manyhands.data.reading import pad_and_collate
from manyhands.data.reading.augment import Compose, FeatureNoise
from manyhands.data.reading.micro_batch_feed import MicroBatchFeed, held_out_batches
from manyhands.data.reading.prepared_data import PreparedData, prepared
from manyhands.data.reading.records import sampled_digest
from manyhands.data.reading.shard_records import ShardRecords
from manyhands.data.serving.stored_encoders import read_stored
from manyhands.data.shards.shard_columns import Ragged
from manyhands.launch.engines.launcher import Launcher
from manyhands.training.compute.seeds import seed_everything
from manyhands.values.errors import DataDamaged, DataError
from tests.data.shards.test_damaged_blocks import flip
from tests.support.prepared_folders import fixed, mixed_table, row_bytes, write_folder

SIZES = (13, 0, 7, 20)


def open_prepared(folder: Path, split: str = "train", **options: Any) -> ShardRecords:
    return ShardRecords(prepared(folder, split, **options))


ROWS = sum(SIZES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    """Four shards of `mixed_table`, one of them empty."""
    table = mixed_table(ROWS)
    return write_folder(
        tmp_path_factory.mktemp("prepared"), {"train": cut(table)}, shapes={"image": (2, 2, 3)}
    )


def cut(table: pa.Table, sizes: tuple[int, ...] = SIZES) -> list[pa.Table]:
    starts = np.concatenate([[0], np.cumsum(sizes)])
    return [table.slice(a, n) for a, n in zip(starts[:-1].tolist(), sizes, strict=True)]


def ids(*numbers: int) -> Any:
    return np.asarray(numbers, dtype=np.int64)


def test_a_batch_holds_the_records_that_were_asked_for(folder: Path) -> None:
    records = open_prepared(folder)
    assert len(records) == ROWS
    asked = [39, 0, 14, 13, 0, 25]
    batch = records.batch(ids(*asked))
    table = mixed_table(ROWS)
    assert batch["_id"].tolist() == asked
    assert "name" not in batch  # text is given only where it is named
    kinds = {name: (value.dtype, tuple(value.shape)) for name, value in batch.items()}
    assert kinds == {
        "_id": (torch.int64, (6,)),
        "age": (torch.float32, (6,)),
        "count": (torch.int64, (6,)),
        "sure": (torch.bool, (6,)),
        "level": (torch.int64, (6,)),
        "x": (torch.float32, (6, 2)),
        "image": (torch.uint8, (6, 2, 2, 3)),
        "tokens": (torch.int64, (6, 3)),
        "tokens_length": (torch.int64, (6,)),
        "weights": (torch.float32, (6, 3)),
        "weights_length": (torch.int64, (6,)),
        "blob": (torch.uint8, (6, 27)),
        "blob_length": (torch.int64, (6,)),
    }
    for name in ("age", "count", "sure", "level", "x"):
        assert batch[name].tolist() == [table[name][i].as_py() for i in asked]
    for name in ("tokens", "weights"):
        assert unpadded(batch, name) == [table[name][i].as_py() for i in asked]
    assert unpadded(batch, "blob") == [row_bytes(i) for i in asked]
    records.close()


def unpadded(batch: dict[str, Any], name: str) -> list[list[Any]]:
    """The rows, after checking that what fills them up is zero."""
    rows = batch[name].tolist()
    lengths = batch[f"{name}_length"].tolist()
    assert all(not any(row[n:]) for row, n in zip(rows, lengths, strict=True))
    return [row[:n] for row, n in zip(rows, lengths, strict=True)]


@given(asked=st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=50))
@settings(max_examples=50)
def test_a_batch_is_its_records_whatever_was_asked_for_with_them(
    folder: Path, asked: list[int]
) -> None:
    records = open_prepared(folder, columns=["tokens", "x", "blob", "name"])
    batch = records.batch(ids(*asked))
    assert batch["_id"].tolist() == asked
    assert batch["x"].tolist() == [[i, i + 0.5] for i in asked]
    assert batch["name"] == [f"né {i}" for i in asked]
    assert unpadded(batch, "tokens") == [[i * 10 + k for k in range(i * 7 % 5)] for i in asked]
    assert unpadded(batch, "blob") == [row_bytes(i) for i in asked]
    records.close()


@pytest.mark.parametrize("long", [1, 1000])
@pytest.mark.parametrize("equal", [False, True])
def test_every_way_of_gathering_gives_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, long: int, equal: bool
) -> None:
    monkeypatch.setattr(pad_and_collate, "LONG", long)
    table = mixed_table(ROWS, equal=equal)
    asked = [39, 38, 0, 14, 13, 3]
    for sizes in (SIZES, (ROWS,)):
        folder = write_folder(tmp_path / str(len(sizes)), {"train": cut(table, sizes)})
        records = open_prepared(folder)
        batch = records.batch(ids(*asked))
        for name in ("tokens", "weights", "blob"):
            wanted = [list(table[name][i].as_py()) for i in asked]
            assert unpadded(batch, name) == wanted
        records.close()


def test_rows_can_be_cut_to_a_length_or_left_as_they_are(folder: Path) -> None:
    asked = [4, 0, 18, 22]
    rows = [[i * 10 + k for k in range(i * 7 % 5)] for i in asked]
    short = open_prepared(folder, columns=["tokens"], pad=2).batch(ids(*asked))
    assert short["tokens"].shape == (4, 2)
    assert unpadded(short, "tokens") == [row[:2] for row in rows]
    long = open_prepared(folder, columns=["tokens"], pad=700).batch(ids(*asked))
    assert long["tokens"].shape == (4, 700) and unpadded(long, "tokens") == rows
    flat = open_prepared(folder, columns=["tokens", "blob"], pad="flat").batch(ids(*asked))
    assert flat["tokens"].dtype == torch.int64
    assert flat["tokens"].tolist() == [token for row in rows for token in row]
    offsets = flat["tokens_offsets"].tolist()
    assert offsets == [0, *np.cumsum([len(row) for row in rows]).tolist()]
    assert flat["blob"].tolist() == [b for i in asked for b in row_bytes(i)]


def test_batches_of_empty_rows_are_empty(tmp_path: Path) -> None:
    table = pa.table({"_id": [0, 1], "t": pa.array([[], []], pa.list_(pa.int32()))})
    folder = write_folder(tmp_path, {"train": [table]})
    assert open_prepared(folder).batch(ids(1, 0))["t"].shape == (2, 0)
    assert open_prepared(folder, pad=3).batch(ids(1, 0))["t"].tolist() == [[0] * 3] * 2
    assert open_prepared(folder, pad="flat").batch(ids(1, 0))["t_offsets"].tolist() == [0, 0, 0]


def test_columns_are_stacked_to_a_matrix(folder: Path) -> None:
    records = open_prepared(folder, stack={"features": ["age", "x", "sure"]})
    batch = records.batch(ids(30, 3))
    assert batch["features"].dtype == torch.float32
    assert batch["features"].tolist() == [[15, 30, 30.5, 1], [1.5, 3, 3.5, 1]]
    assert "age" not in batch and "count" in batch
    records.close()


def first_records(data: PreparedData, count: int) -> dict[str, Any]:
    records = ShardRecords(data)
    try:
        return records.batch(np.arange(count))
    finally:
        records.close()


def test_all_numeric_features_are_stacked_without_naming_them(tmp_path: Path) -> None:
    csv = tmp_path / "rows.csv"
    rows = [f"{i}.5,job{i % 4},{i % 2},{7 * i},{i % 3}" for i in range(40)]
    csv.write_text("hours,job,flag,pay,y\n" + "\n".join(rows))
    mh.prepare(csv, tmp_path / "data", label="y", workers=1, encode=["pay=raw"])
    data = mh.prepared(tmp_path / "data", stack={"x": "features"})
    assert data.names_in("x") == ("hours", "flag")  # of whole numbers, nobody knows what they are
    named = mh.prepared(tmp_path / "data", stack={"x": ["hours", "flag"]})
    batch, again = first_records(data, 5), first_records(named, 5)
    assert batch["x"].shape == (5, 2) and batch["x"].dtype == torch.float32
    assert torch.equal(batch["x"], again["x"])
    assert batch.keys() == again.keys() == {"_id", "job", "pay", "y", "x"}
    assert read_stored(tmp_path / "data", data).data == named  # and so has predicting
    with pytest.raises(DataError, match="no stack 'z'; there are: x"):
        data.names_in("z")
    with pytest.raises(DataError, match=r"x is 'hours'; give a list of columns, or \"features\""):
        mh.prepared(tmp_path / "data", stack={"x": "hours"})  # type: ignore[dict-item]


def test_a_stack_names_each_column_of_its_matrix(folder: Path) -> None:
    data = mh.prepared(folder, stack={"f": ["age", "x", "sure"]})
    assert data.names_in("f") == ("age", "x[0]", "x[1]", "sure")
    every = mh.prepared(folder, stack={"f": "features"})
    assert every.names_in("f") == ("age", "sure", "x[0]", "x[1]")
    assert len(every.names_in("f")) == first_records(every, 2)["f"].shape[1]


def test_features_that_are_none_are_told(tmp_path: Path) -> None:
    table = pa.table({"_id": np.arange(4), "t": np.arange(4)})
    data = mh.prepared(write_folder(tmp_path / "data", {"train": [table]}), stack={"x": "features"})
    with pytest.raises(DataError, match="there are no numeric features"):
        ShardRecords(data)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"split": "tset"}, "no split 'tset'; there are train"),
        ({"columns": ["agee"]}, "no column 'agee'"),
        ({"stack": {"f": ["agee"]}}, "no column 'agee'"),
        ({"stack": {"f": ["tokens"]}}, "different lengths"),
        ({"stack": {"age": ["x"]}}, "is a column already"),
        ({"pad": 0}, "give a length"),
        ({"pad": "longer"}, "give a length"),
    ],
)
def test_what_is_not_there_is_named(folder: Path, options: Any, says: str) -> None:
    with pytest.raises(DataError, match=says):
        open_prepared(folder, **options)


def test_a_folder_that_is_not_prepared_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not a prepared data set"):
        open_data(str(tmp_path), None)


# ---- order, parts, feed


def test_an_epoch_of_any_windows_holds_every_record_once(folder: Path) -> None:
    for window in (1, 10, 1000):
        records = open_prepared(folder, window=window)
        feed = MicroBatchFeed(records, seed=5, batch=9, micro_batch=4, seeder=seed_everything)
        seen: list[int] = []
        for step in range(10):
            here = feed.cut(step)
            for micro_batch in feed.micro_batches(here, range(len(here.sizes))):
                seen += micro_batch.batch["_id"].tolist()
                assert feed.ids(here, micro_batch.index) == micro_batch.batch["_id"].tolist()
        assert sorted(seen[:ROWS]) == sorted(seen[ROWS:]) == list(range(ROWS))
        assert seen[:ROWS] != seen[ROWS:]
        records.close()


def test_a_part_is_read_shard_by_shard_too(folder: Path) -> None:
    train, held = open_data(prepared(folder, window=10), 0.25)
    assert held is not None and (len(train), len(held)) == (30, 10)
    names = [*train.names(np.arange(30)), *held.names(np.arange(10))]
    assert sorted(names) == list(range(ROWS))
    assert isinstance(train, ShardRecords)
    here = train.order(1, 0)
    assert sorted(here[range(30)].tolist()) == list(range(30))
    assert len(here.windows.shards) > 1
    again = train.part(ids(5, 2))
    assert again.names(ids(0, 1)) == [
        train.names(ids(2))[0],
        train.names(ids(5))[0],
    ]


def many_shards(tmp_path: Path, **options: Any) -> ShardRecords:
    tables = [mixed_table(10, first=10 * i) for i in range(12)]
    return open_prepared(write_folder(tmp_path, {"train": tables}), **options)


def now_open(records: ShardRecords) -> list[int]:
    return sorted(records._open_shards._ready)


def test_the_shards_of_two_windows_are_open_at_most(tmp_path: Path) -> None:
    records = many_shards(tmp_path, window=25)
    for epoch in range(2):
        visit, order = RecordVisit(3, epoch), records.order(3, epoch)
        for start in range(0, 120, 5):
            records.batch(order[range(start, start + 5)], visit)
            wait_for_background()
            assert len(now_open(records)) <= 3 + 4  # the last window is the largest
    records.close()
    assert now_open(records) == []


def test_the_next_window_is_opened_in_the_background(tmp_path: Path) -> None:
    records = many_shards(tmp_path, window=20)
    order = records.order(3, 0)
    records.batch(order[range(5)], RecordVisit(3, 0))
    wait_for_background()
    first, second = order.windows.shards[:2]
    assert now_open(records) == sorted([*first, *second])
    held_out = RecordVisit(3, training=False)
    records.batch(np.arange(4), held_out)
    wait_for_background()
    assert now_open(records) == [0, 1, 2, 3]  # in their own order
    records.batch(np.arange(116, 120), held_out)
    wait_for_background()
    assert now_open(records) == [10, 11]


def wait_for_background() -> None:
    for thread in threading.enumerate():
        if thread.name == "shards":
            thread.join()


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_compressed_shards_give_the_same_batches(
    folder: Path, tmp_path: Path, compression: str
) -> None:
    smaller = write_folder(tmp_path, {"train": cut(mixed_table(ROWS))}, compression=compression)
    same(open_prepared(smaller), open_prepared(folder, columns=None))


@pytest.mark.parametrize("format", ["parquet", "tfrecord"])
def test_other_formats_give_the_same_batches(folder: Path, tmp_path: Path, format: str) -> None:
    other = write_folder(tmp_path, {"train": cut(mixed_table(ROWS))}, format=format)
    same(open_prepared(other), open_prepared(folder))
    flip(other / f"train-00003.{format}", 100)
    with pytest.raises(DataDamaged, match="train-00003"):
        open_prepared(other).batch(ids(ROWS - 1))


def same(ours: ShardRecords, theirs: ShardRecords) -> None:
    asked = np.random.default_rng(0).integers(0, ROWS, 30)
    a, b = ours.batch(asked), theirs.batch(asked)
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype
        assert torch.equal(a[name].flatten(), b[name].flatten())
    ours.close()
    theirs.close()


# ---- damage


def test_damage_is_found_when_its_shard_is_opened(tmp_path: Path) -> None:
    tables = [mixed_table(10, first=10 * i) for i in range(3)]
    folder = write_folder(tmp_path, {"train": tables})
    flip(folder / "train-00001.arrow", 900)
    records = open_prepared(folder)
    with pytest.raises(DataDamaged, match=r"train-00001\.arrow: bytes 0 to"):
        for start in range(0, 30, 5):
            records.batch(np.arange(start, start + 5))
    records.close()
    unchecked = open_prepared(folder, verify=False)
    assert unchecked.batch(np.arange(30))["_id"].shape == (30,)
    unchecked.close()


def test_a_file_that_comes_back_is_read_after_all(tmp_path: Path) -> None:
    """What could not be opened in the background is tried again by those who need it."""
    tables = [mixed_table(10, first=10 * i) for i in range(2)]
    folder = write_folder(tmp_path, {"train": tables})
    (folder / "train-00001.arrow").rename(folder / "elsewhere")
    records = open_prepared(folder)
    held_out = RecordVisit(training=False)
    records.batch(np.arange(10), held_out)
    wait_for_background()
    (folder / "elsewhere").rename(folder / "train-00001.arrow")
    assert records.batch(np.arange(10, 20), held_out)["_id"].tolist() == list(range(10, 20))
    records.close()


class Counted:
    """A transfer that counts who holds what."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.held = folder, dict[str, int]()

    def path(self, info: Any) -> Path:
        self.held[info.file] = self.held.get(info.file, 0) + 1
        return self.folder / info.file

    def release(self, info: Any) -> None:
        self.held[info.file] -= 1


def test_shards_that_are_transferred_are_released(tmp_path: Path) -> None:
    many_shards(tmp_path).close()
    transfer = Counted(tmp_path)
    data = dataclasses.replace(prepared(tmp_path, window=20), transfer=transfer)
    records = ShardRecords(data)
    visit, order = RecordVisit(3, 0), records.order(3, 0)
    for start in range(0, 120, 5):
        records.batch(order[range(start, start + 5)], visit)
    records.close()
    assert set(transfer.held.values()) == {0} and len(transfer.held) == 12


# ---- processes


def test_it_travels_as_a_description(folder: Path) -> None:
    records = open_prepared(folder, columns=["x"])
    before = records.batch(ids(30, 3))
    for module in (pickle, cloudpickle):
        parcel = module.dumps(records)
        assert len(parcel) < 1000
        again = pickle.loads(parcel)
        assert torch.equal(again.batch(ids(30, 3))["x"], before["x"])
        again.close()
    part = pickle.loads(pickle.dumps(records.part(ids(7, 3))))
    assert part.batch(ids(0, 1))["_id"].tolist() == [3, 7]
    records.close()


def test_it_can_be_read_in_a_forked_process(folder: Path) -> None:
    records = open_prepared(folder)
    before = records.batch(ids(30, 3))["x"]
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(records.batch(ids(30, 3))["x"], before) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    records.close()


# ---- tasks


def test_a_path_is_data_and_its_other_split_is_held_out(tmp_path: Path) -> None:
    tables = {"train": [mixed_table(20)], "test": [mixed_table(5, first=100)]}
    folder = write_folder(tmp_path / "two", tables)
    train, held = open_data(str(folder), None)
    assert held is not None and (len(train), len(held)) == (20, 5)
    seen = held_out_batches(held, batch=3, indices=range(2), seed=0, seeder=seed_everything)
    assert [b["_id"].tolist() for _, _, b in seen] == [[100, 101, 102], [103, 104]]
    _, held = open_data(folder, 0.5)
    assert held is not None and len(held) == 10
    _, held = open_data(folder, str(folder))
    assert held is not None and len(held) == 5
    assert open_data(prepared(folder, "test"), None)[1] is None
    three = write_folder(tmp_path / "three", {**tables, "valid": [mixed_table(7, first=200)]})
    _, held = open_data(prepared(three, columns=["x"]), None)
    assert held is not None and len(held) == 7
    assert held.batch(ids(0)).keys() == {"_id", "x"}
    alone = write_folder(tmp_path / "one", {"train": [mixed_table(20)]})
    assert open_data(alone, None)[1] is None


def test_the_mark_of_the_data_is_its_manifest(folder: Path, tmp_path: Path) -> None:
    mark = sampled_digest(open_prepared(folder))
    assert mark == sampled_digest(open_prepared(folder, columns=["x"]))
    other = write_folder(tmp_path, {"train": cut(mixed_table(ROWS, first=1))})
    assert mark != sampled_digest(open_prepared(other))


def test_transforms_know_record_epoch_and_whether_it_is_training(folder: Path) -> None:
    def noisy(batch: dict[str, Any], draw: Any) -> dict[str, Any]:
        return {**batch, "u": draw.uniform("u"), "training": draw.training}

    records = open_prepared(folder, columns=["x"], transform=noisy)
    assert records.draws_randomness
    together = records.batch(ids(5, 30, 3), RecordVisit(1, 2))
    alone = records.batch(ids(30), RecordVisit(1, 2))
    assert together["u"][1] == alone["u"][0] and together["training"]
    assert records.batch(ids(30), RecordVisit(1, 3))["u"] != alone["u"]
    assert not records.batch(ids(30), RecordVisit(1, training=False))["training"]
    records.close()


def regression(data: Any) -> mh.Task:
    return mh.Task(
        model=lambda: torch.nn.Linear(4, 1),
        loss=lambda model, batch: ((model(batch["x"]).squeeze(1) - batch["y"]) ** 2).mean(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.05),
        data=data,
    )


@pytest.fixture
def numbers() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"x": torch.randn(100, 4, generator=generator), "y": torch.randn(100)}


def shards_of(numbers: dict[str, torch.Tensor], folder: Path) -> Path:
    x, y = numbers["x"].numpy(), numbers["y"].numpy()
    table = pa.table({"_id": np.arange(100), "x": fixed(x), "y": y})
    return write_folder(folder, {"train": cut(table, (40, 35, 25))})


def fingerprint(data: Any, to: Path, workers: int, launcher: Launcher) -> str:
    settings = ["train.batch=16", "train.micro_batch=4", "train.epochs=2"]
    report = mh.train(
        regression(data), to=to, workers=workers, settings=settings, quiet=True, launcher=launcher
    )
    return report.fingerprint


def test_training_on_shards_is_training_on_the_same_records_in_memory(
    numbers: dict[str, torch.Tensor], tmp_path: Path, launcher: Launcher
) -> None:
    folder = shards_of(numbers, tmp_path / "data")
    alone = fingerprint(numbers, tmp_path / "memory", 1, launcher)
    assert fingerprint(str(folder), tmp_path / "one", 1, launcher) == alone
    assert fingerprint(folder, tmp_path / "three", 3, launcher) == alone


def test_windows_and_transforms_do_not_depend_on_the_number_of_workers(
    numbers: dict[str, torch.Tensor], tmp_path: Path, launcher: Launcher
) -> None:
    folder = shards_of(numbers, tmp_path / "data")
    noisy = prepared(folder, window=30, transform=Compose(FeatureNoise("x")))
    calm = prepared(folder, window=30)
    one = fingerprint(noisy, tmp_path / "one", 1, launcher)
    assert fingerprint(noisy, tmp_path / "three", 3, launcher) == one
    assert fingerprint(calm, tmp_path / "calm", 3, launcher) != one


def test_ragged_columns_need_no_copy() -> None:
    """`Ragged` is what shards give; collation never changes it."""
    values = np.arange(6, dtype=np.int32)
    values.flags.writeable = False
    column = Ragged(np.asarray([0, 1, 3, 6], np.int32), values, None)
    picks = [pad_and_collate.Pick(np.asarray([2, 0, 1]), slice(None))]
    rows, lengths = pad_and_collate.take_padded([column], picks, 3, None)
    assert rows.tolist() == [[3, 4, 5], [0, 0, 0], [1, 2, 0]] and lengths.tolist() == [3, 1, 2]
