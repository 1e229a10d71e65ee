"""Preparing, end to end: same bytes whoever does it and however often they die; nothing lost."""

import errno
import gzip
import hashlib
import json
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import manyhands as mh
from manyhands.data.encoding.encoders import Encoders
from manyhands.data.fetching.placement import ShardHost, place
from manyhands.data.fetching.shard_cache import Cache
from manyhands.data.fetching.shard_server import ShardServer
from manyhands.data.fetching.transfer import Direct, Peer, Peers, Replicate
from manyhands.data.preparing.lineage import alike
from manyhands.data.preparing.overview import overview, verified
from manyhands.data.shards.manifest import read_manifest
from manyhands.data.shards.shard_formats import read_table
from manyhands.launch.engines.launcher import Launcher
from manyhands.values.credentials import Credentials
from manyhands.values.errors import DataDamaged, DataError, DataTaskFailed
from manyhands.values.planned_faults import FaultPlan
from manyhands.values.wrap_text import WIDTH, wrapped

CLASSES = ("low", "middle", "high")


def people(path: Path, count: int = 2000, seed: int = 0) -> Path:
    """Raw records of several kinds, with missing values and repetitions."""
    draw = random.Random(seed)
    lines = ["name,age,work,hours,when,note,income"]
    for i in range(count):
        if i % 50 == 49:
            lines.append(lines[-1])  # the same again
            continue
        age = "" if draw.random() < 0.1 else str(draw.randint(17, 90))
        work = draw.choice(["Private", "State", "?", '"Self, own"'])
        when = f"2015-{draw.randint(1, 12):02}-{draw.randint(1, 28):02} 12:{draw.randint(0, 59):02}"
        note = " ".join(
            draw.choice(["good", "bad", "odd", "new"]) for _ in range(draw.randint(1, 6))
        )
        income = draw.choice(CLASSES)
        lines.append(f"p{i % 300},{age},{work},{draw.gauss(40, 9):.3f},{when},{note},{income}")
    path.write_text("\n".join(lines) + "\n")
    return path


def digest(folder: Path) -> str:
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            found.update(f"{path.relative_to(folder)} ".encode() + path.read_bytes())
    return found.hexdigest()


def rows_of(folder: Path, split: str) -> pa.Table:
    manifest = read_manifest(folder)
    shards = manifest.splits[split].shards
    return pa.concat_tables([read_table(folder / s.file, manifest.schema) for s in shards])


# ---- the same bytes


def test_the_bytes_depend_on_records_and_recipe_alone(tmp_path: Path) -> None:
    source = people(tmp_path / "people.csv")
    ways: list[dict[str, Any]] = [
        {"workers": 1},
        {"workers": 2, "memory": "300kB"},
        {"workers": 3, "memory": "2MB"},
    ]
    digests: set[str] = set()
    with ThreadPoolExecutor(2) as executor:
        for k, way in enumerate([*ways, {"executor": executor, "workers": 2, "memory": "1MB"}]):
            to = tmp_path / f"out{k}"
            mh.prepare(
                [source],
                to,
                label="income",
                split="group=name:0.8",
                roles={"note": "text"},
                shard_size="20kB",
                **way,
            )
            digests.add(digest(to))
            assert not (to / ".work").exists()
            assert len(read_manifest(to).splits["train"].shards) > 1
    assert len(digests) == 1


@pytest.mark.parametrize("format", ["arrow", "parquet", "tfrecord"])
def test_formats_hold_the_same_records(tmp_path: Path, format: str) -> None:
    source = people(tmp_path / "people.csv", 300)
    to = tmp_path / "out"
    mh.prepare([source], to, label="income", roles={"note": "text"}, format=format, workers=1)
    assert not verified(to)
    records = mh.prepared(to)
    from manyhands.data.open_data import open_data

    train, held_out = open_data(records, None)
    assert held_out is not None
    assert len(train) + len(held_out) == 300
    batch: dict[str, Any] = train.batch(np.arange(10))
    assert batch["note"].shape[0] == 10
    assert batch["note_length"].max() == batch["note"].shape[1]
    assert batch["when"].shape == (10, 7)
    again = tmp_path / "again"
    mh.prepare([source], again, label="income", roles={"note": "text"}, workers=1)
    same: dict[str, Any] = open_data(str(again), None)[0].batch(np.arange(10))
    for name, values in batch.items():
        assert torch.equal(values, same[name]), name


def interrupted(command: list[str], after_s: float) -> int:
    """kill -9 a command after some time, if it is not done before; its exit code."""
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        return process.wait(after_s)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
    finally:
        deadline = time.monotonic() + 20
        while of_session(process.pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not of_session(process.pid), "processes that a killed driver has left behind"


def of_session(leader: int) -> list[str]:
    """Processes that were started by this one, or by those it started."""
    stats = [_read(path) for path in Path("/proc").glob("[0-9]*/stat")]
    return [s for s in stats if s and s.rpartition(")")[2].split()[3] == str(leader)]


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_killed_at_any_moment_and_continued(tmp_path: Path) -> None:
    source = people(tmp_path / "people.csv", 4000)
    calm = tmp_path / "calm"
    options = ["--label", "income", "--id", "name", "--memory", "400kB", "--shard-size", "30kB"]
    command = [sys.executable, "-m", "manyhands", "prepare", str(source), *options, "-q"]
    began = time.monotonic()
    assert subprocess.run([*command, "--to", str(calm)], check=False).returncode == 0
    took = time.monotonic() - began
    draw, stormy, kills = random.Random(7), tmp_path / "stormy", 0
    while interrupted([*command, "--to", str(stormy)], draw.uniform(0.4, 1.0) * took) != 0:
        kills += 1
        if (stormy / "manifest.json").exists():  # all that was left to do was tidying up
            break
        took *= 1.0 if kills < 3 else 2.0
    assert kills > 0
    with pytest.raises(DataError, match="already holds"):
        mh.prepare([source], stormy)
    assert digest(stormy) == digest(calm)


def test_drafts_of_killed_processes_do_not_stay(tmp_path: Path) -> None:
    source, calm, stormy = people(tmp_path / "people.csv", 50), tmp_path / "a", tmp_path / "b"
    (stormy / ".work").mkdir(parents=True)
    for name in (".train-00000.arrow.1.draft", ".manifest.json.1.draft"):
        (stormy / name).write_bytes(b"half of it")
    for folder in (calm, stormy):
        mh.prepare([source], folder, label="income", workers=1)
    assert digest(stormy) == digest(calm)


def test_a_worker_process_that_dies_is_replaced(tmp_path: Path) -> None:
    """kill -9 of a pool process in the middle: the driver goes on and the bytes are the same."""
    source = people(tmp_path / "people.csv", 3000)
    options = {"label": "income", "workers": 2, "memory": "300kB"}
    mh.prepare([source], tmp_path / "calm", **options)
    code = (
        "import os, signal, sys, threading, time\n"
        "import manyhands as mh\n"
        "from pathlib import Path\n"
        "def kill():\n"
        "    while True:\n"
        "        time.sleep(0.05)\n"
        "        found = Path(f'/proc/self/task/{os.getpid()}/children').read_text().split()\n"
        # In pieces: a child that has not begun yet shows this very text as its own.
        "        busy = [int(p) for p in found if b'spawn' + b'_main' in "
        "Path(f'/proc/{p}/cmdline').read_bytes()]\n"
        "        if busy and (Path(sys.argv[2]) / '.work' / 'stage').exists():\n"
        "            os.kill(busy[0], signal.SIGKILL)\n"
        "            return\n"
        "threading.Thread(target=kill, daemon=True).start()\n"
        "mh.prepare([sys.argv[1]], sys.argv[2], label='income', workers=2, memory='300kB')\n"
    )
    command = [sys.executable, "-c", code, str(source), str(tmp_path / "stormy")]
    subprocess.run(command, check=True, timeout=100)
    assert digest(tmp_path / "stormy") == digest(tmp_path / "calm")


def test_other_settings_do_not_continue_an_interrupted_preparation(tmp_path: Path) -> None:
    source = people(tmp_path / "people.csv", 200)
    to = tmp_path / "out"
    with pytest.raises(DataError, match="no column matches"):
        mh.prepare([source], to, keep=["nothing*"], workers=1)
    with pytest.raises(DataError, match="no such column"):  # what was refused does not bind
        mh.prepare([source], to, split="group=nobody:0.5", workers=1)
    (to / ".work" / "refused").unlink()  # as if it had been killed
    with pytest.raises(DataError, match="--restart"):
        mh.prepare([source], to, workers=1)
    mh.prepare([source], to, workers=1, restart=True)
    with pytest.raises(DataError, match="already holds a prepared data set"):
        mh.prepare([source], to, workers=1)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"compression": "gzip"}, "there is no compression 'gzip'"),
        ({"format": "foo"}, "there is no format 'foo'"),
        ({"balance": "foo"}, "there is no balance 'foo'"),
        ({"roles": {"age": "foo"}}, "there is no role 'foo'"),
        ({"label": "income", "drop": ["income"]}, "is the label and is also left out"),
        ({"label": "income", "roles": {"age": "label"}}, "more than one column"),
        ({"sample": 1e-9}, "no record is left"),
        ({"memory": "1kB"}, "too little"),
        ({"encode": {"age": "nonsense"}}, "there is no encoding 'nonsense'"),
        ({"types": {"nobody": "int"}}, "there is no column 'nobody'"),
        ({"label": "incom"}, "no column 'incom'; did you mean 'income'"),
        ({"folds": 3, "split": "ratio=0.5"}, "a split or folds"),
        ({"split": "ratio=0.5:0.1"}, "sum to 1"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, options: dict[str, Any], what: str) -> None:
    source = people(tmp_path / "people.csv", 60)
    with pytest.raises(DataError, match=what):
        mh.prepare([source], tmp_path / "out", **{"workers": 1, **options})


def test_names_that_are_ours(tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    rows = [{"_id": f"m{i}", "weight": i, "y": int(i % 40 == 0)} for i in range(400)]
    source.write_text("\n".join(map(json.dumps, rows)) + "\n")
    made = mh.prepare([source], tmp_path / "out", label="y", id="id", workers=1)
    assert {c.name for c in made.schema} == {"_id", "id", "weight", "y"}
    with pytest.raises(DataError, match="--drop weight"):
        mh.prepare([source], tmp_path / "two", label="y", balance="weight", workers=1)
    over = mh.prepare([source], tmp_path / "three", label="y", balance="over", workers=1)
    counts = over.splits["train"].labels
    assert abs(counts["0"] - counts["1"]) < 0.2 * counts["0"]
    assert len(set(rows_of(tmp_path / "three", "train")["_id"].to_pylist())) == sum(counts.values())


# ---- nothing lost


def test_rows_in_are_rows_out_and_rows_reported(tmp_path: Path) -> None:
    source = people(tmp_path / "people.csv", 500)
    lines = source.read_bytes().splitlines()
    lines[10] += b",too many"
    lines[20] = b"too,few"
    lines[30] = lines[30].replace(b"p", b"\xff\xfe", 1)
    lines[40] = lines[40].replace(b"p", b"\0", 1)
    lines[50] = lines[50].rsplit(b",", 1)[0] + b","  # no label
    source.write_bytes(b"\n".join(lines) + b"\n")
    with pytest.raises(DataError) as caught:
        mh.prepare([source], tmp_path / "fails", label="income", workers=1)
    byte = sum(len(line) + 1 for line in lines[:10])
    assert f"{source}, record 10, byte {byte:,}" in str(caught.value)
    with pytest.raises(DataError, match="skip:4 allows 4"):
        mh.prepare([source], tmp_path / "few", label="income", on_error="skip:4", workers=1)
    to = tmp_path / "out"
    mh.prepare([source], to, label="income", on_error="skip:5", workers=1)
    told = overview(to)
    assert told["records"] == 500
    assert told["skipped"] == 5
    assert told["rows"] == 495
    skipped = [json.loads(line) for line in (to / "skipped.jsonl").read_text().splitlines()]
    assert [s["record"] for s in skipped] == [9, 19, 29, 39, 49]


@pytest.mark.parametrize("split", ["0.8", 0.8, ".8", "ratio=0.8"])
def test_a_bare_share_is_that_of_training(split: str | float, tmp_path: Path) -> None:
    csv = tmp_path / "rows.csv"
    csv.write_text("x,y\n" + "".join(f"{i},{i % 2}\n" for i in range(400)))
    manifest = mh.prepare(csv, tmp_path / "data", label="y", split=split, workers=1)
    assert manifest.splits.keys() == {"train", "test"}
    assert 300 < manifest.splits["train"].rows < 340
    assert manifest.splits["test"].rows == 400 - manifest.splits["train"].rows


def test_three_bare_shares_are_train_valid_and_test(tmp_path: Path) -> None:
    csv = tmp_path / "rows.csv"
    csv.write_text("x,y\n" + "".join(f"{i},{i % 2}\n" for i in range(200)))
    manifest = mh.prepare(csv, tmp_path / "data", label="y", split="0.8:0.1:0.1", workers=1)
    assert list(manifest.splits) == ["train", "valid", "test"]
    with pytest.raises(DataError, match=r"shares must be between 0 and 1"):
        mh.prepare(csv, tmp_path / "other", label="y", split="80", workers=1)


def test_records_without_a_time_belong_to_no_split(tmp_path: Path) -> None:
    source = tmp_path / "when.csv"
    rows = [f"{i},2015-03-{1 + i % 28:02}" for i in range(100)]
    rows[40] = "40,"
    source.write_text("x,when\n" + "\n".join(rows) + "\n")
    with pytest.raises(DataError, match=r"record 41.*'when' is missing"):
        mh.prepare([source], tmp_path / "fails", split="time=when:0.8", workers=1)
    to = tmp_path / "out"
    mh.prepare([source], to, split="time=when:0.8", on_error="skip:1", workers=1)
    assert overview(to)["rows"] == 99
    train, test = rows_of(to, "train"), rows_of(to, "test")
    assert max(train["when"].to_pylist()) < min(test["when"].to_pylist())


@pytest.mark.parametrize("balance", ["", "under", "over"])
@pytest.mark.parametrize("sample", [1.0, 0.4])
def test_what_is_left_out_and_repeated_is_accounted_for(
    tmp_path: Path, balance: str, sample: float
) -> None:
    """Records = rows + skipped + left out - repeated; in all, and for each label."""
    source = tmp_path / "rows.csv"
    labels = ["a", "b", "b", "c", "c", "c", "c"]
    rows = [f"{i},{labels[i % 7]},{'' if i == 30 else i}" for i in range(700)]
    rows[44] += ",too many"
    source.write_text("x,y,when\n" + "\n".join(rows) + "\n")
    made: list[dict[str, Any]] = []
    for k, memory in enumerate(("200kB", "1GiB")):
        options = {"label": "y", "split": "time=when:0.7", "on_error": "skip:9", "sample": sample}
        mh.prepare(
            [source], tmp_path / str(k), balance=balance, memory=memory, workers=1, **options
        )
        made.append(overview(tmp_path / str(k)))
    told = made[0]
    assert [told[key] for key in ("sample", "balance", "notes")] == [
        made[1][key] for key in ("sample", "balance", "notes")
    ]
    gone, changed = told["sample"] or {}, told["balance"] or {}
    assert bool(gone) == (sample < 1) and bool(changed) == (balance != "")
    left_out = gone.get("left_out", 0) + changed.get("left_out", 0)
    repeated = changed.get("repeated", 0)
    assert told["records"] == 700 and told["skipped"] == 2
    assert told["records"] == told["rows"] + told["skipped"] + left_out - repeated
    assert (repeated > 0) == (balance == "over")
    for label, count in (("a", 100), ("b", 198), ("c", 400)):
        there = sum(split["labels"][label] for split in told["splits"].values())
        sign = -1 if balance == "over" else 1
        there += gone.get("labels", {}).get(label, 0)
        there += sign * changed.get("labels", {}).get(label, 0)
        assert there == count, label
    words = ["--sample 0.4: "] * bool(gone) + [f"--balance {balance}: "] * bool(changed)
    assert all(any(note.startswith(word) for note in told["notes"]) for word in words)


def test_secrets_are_not_written(tmp_path: Path) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.pipe("/secret/people.csv", people(tmp_path / "people.csv", 50).read_bytes())
    to = tmp_path / "out"
    url = "memory://secret/people.csv?token=hunter2"
    try:
        mh.prepare([url], to, workers=1)
    except DataError as error:
        assert "hunter2" not in str(error)
    for path in to.rglob("*"):
        if path.is_file():
            assert b"hunter2" not in path.read_bytes()


# ---- splits and encoders


@settings(max_examples=15, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 6), st.integers(0, 6), st.sampled_from("abc")),
        min_size=30,
        max_size=120,
    ),
    st.sampled_from(["ratio=0.5", "group=who:0.5"]),
)
def test_nothing_leaks(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[int, int, str]], split: str
) -> None:
    """Ids and contents in any tangle: linked ones are on one side."""
    folder = tmp_path_factory.mktemp("leak")
    source = folder / "rows.csv"
    lines = [f"k{key},{value},{who}" for key, value, who in rows]
    source.write_text("id,value,who\n" + "\n".join(lines) + "\n")
    try:
        made = mh.prepare([source], folder / "out", id="id", split=split, workers=1)
    except DataError as error:
        assert "no record falls into" in str(error)
        return
    assert made.leakage["ids"] == made.leakage["contents"] == 0
    assert sum(s.rows for s in made.splits.values()) == len(rows)


def test_encoders_learn_from_training_records_only(tmp_path: Path) -> None:
    source = tmp_path / "rows.csv"
    rows = [f"{i},{'late' if i >= 80 else 'early'},{i}" for i in range(100)]
    source.write_text("x,word,when\n" + "\n".join(rows) + "\n")
    to = tmp_path / "out"
    made = mh.prepare([source], to, split="time=when:0.8", workers=1)
    train, test = rows_of(to, "train"), rows_of(to, "test")
    values = np.array(train["x"].to_pylist())
    assert abs(values.mean()) < 1e-6 and abs(values.std() - 1) < 1e-6
    assert min(test["x"].to_pylist()) > 1.7
    encoders = Encoders.load(made.encoders)
    served = encoders.apply({"x": [0, 99], "word": ["early", "never seen"]})
    assert served["x"].to_pylist() == [min(train["x"].to_pylist()), max(test["x"].to_pylist())]


def test_folds(tmp_path: Path) -> None:
    source = people(tmp_path / "people.csv", 400)
    to = tmp_path / "out"
    mh.prepare([source], to, label="income", folds=4, workers=1)
    held_out: list[int] = []
    for k in range(4):
        train, test = rows_of(to / f"fold-{k}", "train"), rows_of(to / f"fold-{k}", "test")
        assert train.num_rows + test.num_rows == 400
        held_out += test["_id"].to_pylist()
    assert sorted(held_out) == list(range(400))
    assert not verified(to)


def test_like_another_folder(tmp_path: Path) -> None:
    source = people(tmp_path / "people.csv", 400)
    mh.prepare([source], tmp_path / "first", label="income", split="none", workers=1)
    mh.prepare([source], tmp_path / "second", like=tmp_path / "first", workers=1)
    first, second = rows_of(tmp_path / "first", "train"), rows_of(tmp_path / "second", "test")
    assert first.equals(second)


def test_what_encoders_never_saw_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = tmp_path / "old.csv", tmp_path / "new.csv"
    known = [f"{i},w{i % 3},{'no' if i % 2 else 'yes'}" for i in range(120)]
    old.write_text("x,word,y\n" + "\n".join(known) + "\n")
    rows = [f"{i},{'w1' if i % 3 == 0 else f'v{i}'},{'Yes.' if i % 4 else 'no'}" for i in range(60)]
    new.write_text("x,word,y\n" + "\n".join(rows) + "\n")
    mh.prepare([old], tmp_path / "first", label="y", workers=1, quiet=False)
    assert "not there when" not in capsys.readouterr().err
    made = mh.prepare([new], tmp_path / "second", like=tmp_path / "first", workers=1, quiet=False)
    said = " ".join(capsys.readouterr().err.split())
    assert "label 'y': 45 of 60 records have one that was not there" in said
    assert "(for example 'Yes.')" in said
    assert "feature 'word': 40 of 60 values were not there" in said
    assert made.statistics["x"]["most"] == 59 and made.statistics["word"]["distinct values"] == 41
    assert list(made.statistics["y"]["common values"]) == ["Yes.", "no"]
    assert "'v1', 'v10', 'v11', 'v13', 'v14'" in said
    assert made.lineage["unseen"]["y"] == {"values": 60, "unknown": 45, "examples": ["Yes."]}
    assert made.splits["test"].labels == {"unknown": 45, "no": 15}
    (hint,) = [n for n in overview(tmp_path / "second")["notes"] if n.startswith("hint")]
    assert "'Yes.' and 'yes'" in hint


def test_labels_that_look_alike() -> None:
    labels = ["<=50K", ">50K", "<=50K.", ">50K .", "Cat", " cat", "CAT", "cats", "a.b", "ab"]
    assert alike(labels) == [["<=50K", "<=50K."], [">50K", ">50K ."], [" cat", "CAT", "Cat"]]
    assert alike(["v1", "v1.0", "1", "10"]) == []


def test_mnist_as_it_is_given_away(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    pixels = draw.integers(0, 256, (80, 28, 28), dtype=np.uint8)
    labels = np.arange(80, dtype=np.uint8) % 10
    for name, values in (("images-idx3", pixels), ("labels-idx1", labels)):
        dims = b"".join(n.to_bytes(4, "big") for n in values.shape)
        data = bytes([0, 0, 8, values.ndim]) + dims + values.tobytes()
        (tmp_path / f"train-{name}-ubyte.gz").write_bytes(gzip.compress(data))
    made = mh.prepare([str(tmp_path / "train-*.gz")], tmp_path / "out", split="none", workers=1)
    assert {c.name: (c.role, c.shape) for c in made.schema if c.name != "_id"} == {
        "image": ("image", (28, 28, 1)),
        "label": ("label", ()),
    }
    from manyhands.data.open_data import open_data

    batch: dict[str, Any] = open_data(str(tmp_path / "out"), None)[0].batch(np.arange(80))
    assert batch["image"].dtype == torch.uint8 and batch["image"].shape == (80, 28, 28, 1)
    ids = batch["_id"].numpy()
    assert np.array_equal(batch["image"].numpy()[..., 0], pixels[ids])
    assert np.array_equal(batch["label"].numpy(), labels[ids])


# ---- training on it


def small_task(folder: Path, **options: Any) -> mh.Task:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch["x"]), batch["income"])

    return mh.Task(
        model=model,
        loss=loss,
        optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2),
        data=mh.prepared(folder, stack={"x": ["age", "hours"]}, **options),
    )


def test_training_gives_the_same_bits_for_any_workers_and_through_kills(
    tmp_path: Path, launcher: Launcher
) -> None:
    source = people(tmp_path / "people.csv", 1000)
    mh.prepare([source], tmp_path / "data", label="income", workers=1, shard_size="5kB")
    assert len(read_manifest(tmp_path / "data").splits["train"].shards) > 3
    task = small_task(tmp_path / "data")
    ways: list[tuple[int, FaultPlan | None]] = [
        (1, None),
        (3, None),
        (3, FaultPlan().kill(rank=1, at_step=7, at="update").kill(rank=0, at_step=12)),
    ]
    marks = {
        mh.train(
            task,
            to=tmp_path / f"run{k}",
            workers=workers,
            settings=["train.batch=64", "train.micro_batch=8", "train.epochs=2"],
            quiet=True,
            launcher=launcher,
            faults=faults,
        ).fingerprint
        for k, (workers, faults) in enumerate(ways)
    }
    assert len(marks) == 1


@pytest.mark.parametrize("policy", ["block", "random", "hash", "balanced"])
def test_any_placement_and_transfer_gives_the_same_bits(
    tmp_path: Path, launcher: Launcher, policy: str
) -> None:
    """Two hosts keep the shards between them; a third, where training is, asks them for each."""
    source = people(tmp_path / "people.csv", 600)
    folder = tmp_path / "data"
    made = mh.prepare([source], folder, label="income", workers=1, shard_size="5kB")
    shards = [shard for split in made.splits.values() for shard in split.shards]
    secret = Credentials.of(b"only holders of this may ask....", "shards")
    placement = place(shards, [ShardHost("a"), ShardHost("b")], policy)
    servers: dict[str, ShardServer] = {}
    try:
        for host in ("a", "b"):
            kept = Cache(tmp_path / host)
            for shard in shards:
                if host in placement.holders(shard.file):
                    kept.hold(shard, lambda file, s=shard: copy_into(folder / s.file, file))
                    kept.release(shard)
            servers[host] = ShardServer(kept, shards, secret)
        addresses = {host: server.address for host, server in servers.items()}
        peers = Peers(placement, addresses, secret, here="c")
        transfers = {
            "direct": Direct(str(folder)),
            "replicate": Replicate(str(folder), Cache(tmp_path / "copy")),
            "peer": Peer(None, Cache(tmp_path / "c"), peers),  # no origin: hosts or nobody
        }
        marks: dict[str, str] = {}
        for name, transfer in (
            transfers.items() if policy == "hash" else [("peer", transfers["peer"])]
        ):
            task = small_task(folder, transfer=transfer)
            marks[name] = fingerprint_of(task, tmp_path / f"run-{name}", launcher)
        marks["plain"] = fingerprint_of(small_task(folder), tmp_path / "run-plain", launcher)
        assert len(set(marks.values())) == 1, marks
    finally:
        for server in servers.values():
            server.close()


def copy_into(path: Path, file: Any) -> None:
    file.write(path.read_bytes())


def fingerprint_of(task: mh.Task, to: Path, launcher: Launcher) -> str:
    settings = ["train.batch=64", "train.micro_batch=16", "train.epochs=1"]
    report = mh.train(task, to=to, workers=2, settings=settings, quiet=True, launcher=launcher)
    return report.fingerprint


@pytest.mark.parametrize("how", ["flipped", "truncated", "missing"])
def test_damage_is_found_and_named(tmp_path: Path, how: str, launcher: Launcher) -> None:
    source = people(tmp_path / "people.csv", 500)
    folder = tmp_path / "data"
    mh.prepare([source], folder, label="income", workers=1)
    shard = folder / read_manifest(folder).splits["train"].shards[0].file
    data = bytearray(shard.read_bytes())
    match how:
        case "flipped":
            data[len(data) // 2] ^= 4
            shard.write_bytes(data)
        case "truncated":
            shard.write_bytes(data[:-100])
        case _:
            shard.unlink()
    (damage,) = verified(folder)
    assert shard.name in damage and "bytes" in damage
    with pytest.raises((mh.RunFailed, DataDamaged, mh.RequestError)) as caught:
        mh.train(small_task(folder), to=tmp_path / "run", workers=2, quiet=True, launcher=launcher)
    assert shard.name in str(caught.value)


def test_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from manyhands.cli.exit_codes import main

    source = people(tmp_path / "people.csv", 300)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["manyhands", *arguments])
        with pytest.raises(SystemExit) as left:
            main()
        code = left.value.code
        assert isinstance(code, int)
        return subprocess.CompletedProcess(arguments, code, *capsys.readouterr())

    to = str(tmp_path / "out")
    made = run("prepare", str(source), "--label", "income", "--to", to)
    assert made.returncode == 0, made.stderr
    assert "no record is in two splits" in made.stdout
    assert max(map(len, made.stdout.splitlines())) <= 100
    shown = json.loads(run("data", to, "--json").stdout)
    assert set(shown["splits"]) == {"train", "test"}
    assert sum(s["rows"] for s in shown["splits"].values()) == 300
    assert sum(shown["splits"]["train"]["labels"].values()) == shown["splits"]["train"]["rows"]
    assert run("data", to, "--verify").returncode == 0
    shard = next(Path(to).glob("train-*.arrow"))
    data = bytearray(shard.read_bytes())
    data[1000] ^= 1
    shard.write_bytes(data)
    broken = run("data", to, "--verify")
    assert broken.returncode == 1 and shard.name in broken.stderr
    wrong = run("prepare", str(source), "--split", "half", "--to", to + "2")
    assert wrong.returncode == 2 and "ratio=0.8" in wrong.stderr
    alike = tmp_path / "alike.csv"
    alike.write_text("x,y\n" + "".join(f"{i},{'>50K' + '.' * (i % 2)}\n" for i in range(99)))
    hinted = run("prepare", str(alike), "--label", "y", "--to", to + "3", "--sample", "0.5")
    assert "'>50K' and '>50K.'" in " ".join(hinted.stdout.split())
    assert "--sample 0.5: " in hinted.stderr and "--sample 0.5: " not in hinted.stdout
    assert "--sample 0.5: " in run("data", to + "3").stdout


def test_work_that_crashed_is_a_run_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1 with the message; and what was asked for binds nobody."""
    from manyhands.cli.exit_codes import main
    from manyhands.data.preparing import encode_pieces

    source, to = people(tmp_path / "people.csv", 60), tmp_path / "out"
    command = ["manyhands", "prepare", str(source), "--to", str(to), "--workers", "1"]
    monkeypatch.setattr(sys, "argv", command)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(encode_pieces, "apply", full)
        with pytest.raises(SystemExit) as left:
            main()
    said = capsys.readouterr().err
    assert left.value.code == 1 and "manyhands: apply, task 000000: the disk is full" in said
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 0 and not verified(to)

    def failing() -> Any:
        yield {"x": 1}
        raise KeyError("lost")

    with pytest.raises(DataTaskFailed, match="failed at record 2"):
        mh.prepare(failing(), tmp_path / "other")


def test_messages_fit_a_terminal_and_keep_names_whole() -> None:
    name = "/data/" + "a-very-long-name" * 8
    text = f"{name}, record 3: {'some words ' * 20}\n  indented {'words ' * 30}\nshort"
    lines = wrapped(text, first=11).split("\n")
    assert lines[0] == f"{name}," and lines[-1] == "short"
    assert all(len(line) <= WIDTH for line in lines[1:])
    assert [line for line in lines if line.startswith("    words")]
    assert " ".join(" ".join(lines).split()) == " ".join(text.split())
    assert len(wrapped("word " * 40, first=11).split("\n")[0]) <= WIDTH - 11
    assert wrapped("  as it  is\t") == "  as it  is\t"
