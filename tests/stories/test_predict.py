"""What a model says of records: raw files in, predictions by name out, in order, none lost."""

import gzip
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pyarrow import csv

import manyhands as mh
from manyhands.data.encoding.encoders import Encoders
from manyhands.data.shards.manifest import read_manifest
from manyhands.launch.engines.launcher import Launcher
from manyhands.prediction.named_predictions import Naming
from manyhands.prediction.output_meaning import meaning_of
from manyhands.values.errors import DataError, RequestError, RunFailed, TaskError
from tests.support.clicks import TASK, write_clicks
from tests.support.tasks import make

SETTINGS = ["train.batch=64", "train.micro_batch=32", "train.epochs=2"]


@pytest.fixture(scope="module")
def folder(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Prepared, trained, and with a file to predict."""
    root = tmp_path_factory.mktemp("clicks")
    write_clicks(root / "train.csv", 400)
    write_clicks(root / "test.csv", 150, seed=2, label=False)
    mh.prepare(
        root / "train.csv",
        root / "data",
        label="clicked",
        id="id",
        encode={"user": "vocabulary", "age": "standard", "hour": "quantile:8"},
    )
    (root / "clicks.py").write_text(TASK.format(data=root / "data"))
    mh.train(
        root / "clicks.py",
        to=root / "run",
        workers=2,
        settings=SETTINGS,
        quiet=True,
        launcher=launcher,
    )
    yield root


def big(folder: Path) -> Path:
    """Enough records for several parts."""
    path = folder / "big.csv"
    if not path.exists():
        write_clicks(path, 20_000, seed=3, label=False)
    return path


def rows(path: Path) -> list[dict[str, Any]]:
    return csv.read_csv(path).to_pylist()


def test_predictions_are_what_the_model_says_by_hand(folder: Path, tmp_path: Path) -> None:
    found = mh.predict(folder / "run", folder / "test.csv", to=tmp_path / "out.parquet")
    assert (found.records, found.bad, len(found)) == (150, 0, 150)
    table = pq.read_table(tmp_path / "out.parquet")
    assert table.column_names == [
        "record", "id", "prediction", "probability", "p_no", "p_yes", "error",
    ]  # fmt: skip
    raw = csv.read_csv(folder / "test.csv")
    encoded = Encoders.load(read_manifest(folder / "data").encoders).apply(raw)
    batch = {n: torch.tensor(encoded.column(n).to_pylist()) for n in ("user", "age", "hour")}
    model = mh.load(folder / "run")
    with torch.no_grad():
        likely = torch.sigmoid(model(batch))
    assert torch.allclose(torch.tensor(table.column("p_yes").to_pylist()), likely, atol=1e-6)
    names = ["yes" if p > 0.5 else "no" for p in likely.tolist()]
    assert table.column("prediction").to_pylist() == names
    assert table.column("record").to_pylist() == list(range(150))
    assert table.column("id").to_pylist() == raw.column("id").to_pylist()
    assert len(set(names)) == 2


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "arrow", "parquet"])
def test_the_same_bytes_for_any_number_of_workers(
    suffix: str, folder: Path, tmp_path: Path
) -> None:
    parts = suffix == "parquet"  # once with several: this takes processes that import torch
    source = big(folder) if parts else folder / "test.csv"
    one, three = tmp_path / f"one.{suffix}", tmp_path / f"three.{suffix}"
    mh.predict(folder / "run", source, to=one, keep=["user"], memory="1MB")
    found = mh.predict(folder / "run", source, to=three, keep="user", workers=3, memory="1MB")
    assert one.read_bytes() == three.read_bytes() and found.bad == 0
    assert found.table.num_rows == found.records
    dead = subprocess.Popen(["true"])
    dead.wait()
    (tmp_path / f".{one.name}.{dead.pid}.draft").touch()  # of one that was killed
    mh.predict(folder / "run", folder / "test.csv", to=one)
    assert os.listdir(tmp_path) in ([one.name, three.name], [three.name, one.name])


def test_bad_records_are_named_and_not_lost(folder: Path, tmp_path: Path) -> None:
    lines = (folder / "test.csv").read_text().splitlines()
    lines[3] = "2,u1"  # too few
    lines[5] = lines[5].replace(lines[5].split(",")[2], "old")  # an age that is no number
    lines[7] = '6,"u1,3,4'  # a quote that is opened; it ends with the file's next one
    broken = tmp_path / "broken.csv"
    broken.write_text("\n".join(lines[:7] + lines[8:]) + "\n")
    found = mh.predict(folder / "run", broken, to=tmp_path / "out.csv")
    assert found.bad == 2 and found.records == 149
    made = rows(tmp_path / "out.csv")
    assert [r["record"] for r in made] == list(range(149)), "in the order of the file"
    wrong = [r for r in made if r["error"]]
    assert [r["record"] for r in wrong] == [2, 4]
    places = [text.removeprefix(str(broken)).partition(": ")[0] for text in found.examples]
    assert [place.split(", ")[1] for place in places] == ["record 2", "record 4"], "as in the rows"
    assert "'old' is no" in wrong[1]["error"] and wrong[1]["p_yes"] is None
    assert all(r["prediction"] in ("yes", "no") for r in made if not r["error"])
    with pytest.raises(
        DataError, match=r"(?s)2 bad records:.*record 2,.*record 4,.*--on-error list"
    ):
        mh.predict(folder / "run", broken, to=tmp_path / "no.csv", on_error="fail")
    with pytest.raises(DataError, match=r"2 bad records"):
        mh.predict(folder / "run", broken, to=tmp_path / "no.csv", on_error="skip:1")
    assert not (tmp_path / "no.csv").exists() and not list(tmp_path.glob(".*"))
    assert mh.predict(folder / "run", broken, on_error="skip:2").bad == 2
    only = tmp_path / "only.csv"
    only.write_text("id,user,age,hour\n1,u1,old,3\n")
    table = mh.predict(folder / "run", only).table
    assert table.num_rows == 1 and table.column("error")[0].as_py()


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_bad_records_are_named_by_their_id_where_it_can_be_read(
    suffix: str, folder: Path, tmp_path: Path
) -> None:
    made = csv.read_csv(folder / "test.csv").to_pylist()
    made[4] |= {"age": "old"}
    made[90] |= {"hour": "noon"}
    made[91] |= {"id": "none", "age": "old"}
    made[92] |= {"hour": 3.0}  # which is not bad
    source = tmp_path / f"broken.{suffix}"
    if suffix == "csv":
        lines = [",".join(map(str, row.values())) for row in made]
        lines[7] = "9,u1"  # too few: who knows what is what
        source.write_text("\n".join([",".join(made[0]), *lines]) + "\n")
    else:
        lines = [json.dumps(row) for row in made]
        lines[7] = '{"id": 9, "user": '
        source.write_text("\n".join(lines) + "\n")
    table = mh.predict(folder / "run", source, keep=["user"]).table
    wrong = [row for row in table.to_pylist() if row["error"]]
    assert [row["record"] for row in wrong] == [4, 7, 90, 91]
    ids = [made[4]["id"], None, made[90]["id"], None]
    users = [made[4]["user"], None, made[90]["user"], made[91]["user"]]
    assert [row["id"] for row in wrong] == ids and ids[0] is not None
    assert [row["user"] for row in wrong] == users
    good = [row for row in table.to_pylist() if not row["error"]]
    assert [row["id"] for row in good] == [made[row["record"]]["id"] for row in good]


def test_ids_of_bad_records_are_theirs_in_files_of_many_pieces(
    folder: Path, tmp_path: Path
) -> None:
    header, *lines = big(folder).read_text().splitlines()
    broken = [3, 7_000, 7_001, 12_345, 19_999]
    for k in broken:
        number, user, _, hour = lines[k].split(",")
        lines[k] = f"{number}0,{user},old,{hour}"
    (tmp_path / "broken.csv").write_text("\n".join([header, *lines]) + "\n")
    table = mh.predict(folder / "run", tmp_path / "broken.csv", memory="1MB").table
    wrong = [(r["record"], r["id"]) for r in table.to_pylist() if r["error"]]
    assert wrong == [(k, 10 * k) for k in broken]


def test_what_files_may_look_like(folder: Path, tmp_path: Path) -> None:
    run = folder / "run"
    plain = mh.predict(run, folder / "test.csv").table

    def predicted(name: str, text: str | bytes, **more: Any) -> pa.Table:
        path = tmp_path / name
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return mh.predict(run, path, **more).table

    text = (folder / "test.csv").read_text()
    assert predicted("a.csv.gz", gzip.compress(text.encode())) == plain
    read = csv.read_csv(folder / "test.csv")
    lines = "".join(json.dumps(row) + "\n" for row in read.to_pylist())
    assert predicted("a.jsonl", lines) == plain
    assert mh.predict(run, read.to_pandas()).table == plain, "a DataFrame"
    assert mh.predict(run, read.to_pydict()).table == plain, "columns"
    assert mh.predict(run, read.to_pylist()).table == plain, "dicts"
    assert mh.predict(run, read.to_pandas()).to_pandas().shape == (150, 7)
    shuffled = read.select(["hour", "age", "user", "id"]).append_column("more", [["x"] * 150])
    pq.write_table(shuffled, tmp_path / "a.parquet")
    assert mh.predict(run, tmp_path / "a.parquet").table == plain, "more columns, another order"
    kept = mh.predict(run, tmp_path / "a.parquet", keep=["more", "age"]).table
    assert kept.column_names[:4] == ["record", "id", "more", "age"]
    with_gaps = [
        {**row, "hour": float(row["hour"]), "id": float(row["id"])} for row in read.to_pylist()
    ]
    assert predicted("b.jsonl", "".join(json.dumps(r) + "\n" for r in with_gaps)) == plain, (
        "3.0 is 3"
    )
    unseen = predicted("b.csv", "id,user,age,hour\n1,nobody,44,5\n2,,44,5\n")
    assert unseen.column("error").null_count == 2, "unseen and missing values have a place"
    one = predicted("c.csv", "\n".join(text.splitlines()[:2]) + "\n")
    assert one.slice(0, 1).column("p_yes")[0].as_py() == pytest.approx(
        plain.column("p_yes")[0].as_py(), abs=1e-6
    )
    several = mh.predict(run, [folder / "test.csv", tmp_path / "b.csv"], to=tmp_path / "o.csv")
    files = [row["file"] for row in rows(tmp_path / "o.csv")]
    assert files == [str(folder / "test.csv")] * 150 + [str(tmp_path / "b.csv")] * 2
    assert several.records == 152
    none = mh.predict(
        run, _written(tmp_path / "d.csv", "id,user,age,hour\n"), to=tmp_path / "e.csv"
    )
    assert none.records == 0
    assert (tmp_path / "e.csv").read_text().count("\n") == 1 and "p_yes" in (
        tmp_path / "e.csv"
    ).read_text()
    with pytest.warns(UserWarning, match="no record has a 'hour'"):
        loose = predicted("e.jsonl", '{"user": "u1", "age": 3}\n')
    assert loose.num_rows == 1
    with pytest.raises(DataError, match=r"e\.csv is empty|nothing in"):
        predicted("f.csv", "")
    with pytest.raises(DataError, match=r"has no column 'hour'; there are age, id, user"):
        predicted("g.csv", "id,user,age\n1,u1,3\n")
    with pytest.raises(DataError, match="has no column 'colour'"):
        mh.predict(run, folder / "test.csv", keep=["colour"])
    with pytest.raises(DataError, match="there is no file"):
        mh.predict(run, tmp_path / "nowhere.csv")
    with pytest.raises(DataError, match="nowhere"):
        mh.predict(run, "unknown://nowhere/test.csv")


def _written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_requests_that_make_no_sense(folder: Path, tmp_path: Path) -> None:
    run, test = folder / "run", folder / "test.csv"
    with pytest.raises(RequestError, match=r"ends in \.parquet, \.csv"):
        mh.predict(run, test, to=tmp_path / "out.xlsx")
    with pytest.raises(RequestError, match="there is no folder"):
        mh.predict(run, test, to=tmp_path / "no" / "out.csv")
    with pytest.raises(RequestError, match="is one of the files"):
        mh.predict(run, test, to=test)
    with pytest.raises(RequestError, match="outputs 'chances'; use logits"):
        mh.predict(run, test, outputs="chances")
    with pytest.raises(DataError, match="has no column 'clicked'"):
        mh.predict(run, test, score=True)
    with pytest.raises(DataError, match=r"--split x: only a prepared folder|is not a prepared"):
        mh.predict(run, {"x": torch.zeros(3)}, split="x", task=make("cnn"))
    other = folder / "other"
    if not other.exists():
        mh.prepare(folder / "train.csv", other, label="clicked", encode={"age": "minmax"})
    with pytest.raises(DataError, match="encoded otherwise"):
        mh.predict(run, other)


def test_prepared_folders_and_scores(folder: Path, tmp_path: Path) -> None:
    """A split of the run's own folder, by its encoders or as it was encoded: the same."""
    run = folder / "run"
    held = mh.predict(run)
    assert held.records == 91 and held.table.column_names[:2] == ["file", "record"]
    numbers = held.table.column("record").to_pylist()
    raw = mh.predict(run, folder / "train.csv", score=True)
    assert raw.scores is not None and set(raw.scores) == {"loss", "accuracy"}
    there = raw.table.take(pa.array(numbers))
    assert there.column("prediction") == held.table.column("prediction")
    again = mh.predict(run, folder / "data", split="test", score=True)
    assert again.table == held.table
    assert again.scores == mh.evaluate(run) or again.scores == pytest.approx(mh.evaluate(run))
    truth = csv.read_csv(folder / "train.csv").column("clicked").to_pylist()
    right = [t == p for t, p in zip(truth, raw.table.column("prediction").to_pylist(), strict=True)]
    assert raw.scores["accuracy"] == pytest.approx(sum(right) / len(right))
    assert mh.predict(run, folder / "data", split="train").records == 309


def test_encoders_make_the_batch_that_the_model_takes(folder: Path, tmp_path: Path) -> None:
    model, encode = mh.load(folder / "run"), mh.encoders(folder / "run")
    assert encode.classes == ["no", "yes"] and encode.label == "clicked"
    raw = csv.read_csv(folder / "test.csv")
    expected = mh.predict(folder / "run", folder / "test.csv").table.column("p_yes").to_pylist()
    for records in (raw, raw.to_pylist(), raw.to_pydict(), raw.to_pandas()):
        with torch.no_grad():
            found = torch.sigmoid(model(encode(records)))
        assert found.tolist() == pytest.approx(expected, abs=1e-6)
    assert encode([{"user": "u1", "age": 3, "hour": 4, "clicked": "yes"}])["clicked"].tolist() == [
        1
    ]
    assert encode([{"user": "u1", "age": 3, "hour": 4}])["clicked"].tolist() == [-100]
    with pytest.raises(DataError, match="has no column 'hour'; there are"):
        encode([{"user": "u1", "age": 3}])
    with pytest.raises(DataError, match="column 'age' is no double: old"):
        encode([{"user": "u1", "age": "old", "hour": 4}])
    with pytest.raises(DataError, match="these are no records"):
        encode([3])


def test_other_data_is_scored(folder: Path, tmp_path: Path) -> None:
    """A prepared folder, raw files through the run's encoders, records of Python."""
    run, other = folder / "run", tmp_path / "other.csv"
    write_clicks(other, 120, seed=9)
    held = mh.evaluate(run)
    assert mh.evaluate(run, data=folder / "data") == held
    assert mh.evaluate(run, data=folder / "data", split="train") != held
    assert mh.evaluate(run, split="train") == mh.evaluate(run, data=folder / "data", split="train")
    found = mh.evaluate(run, data=other)
    by_row = mh.predict(run, other, score=True).scores
    assert found == pytest.approx(by_row) and found != held
    mh.prepare(other, tmp_path / "like", like=folder / "data")
    assert mh.evaluate(run, data=tmp_path / "like") == pytest.approx(found)
    assert mh.evaluate(run, data=csv.read_csv(other).to_pylist()) == pytest.approx(found)
    text = other.read_text().replace("\n5,", "\n5,1,2,3,4,5,")
    _written(tmp_path / "bad.csv", text)
    with pytest.raises(DataError, match="1 bad record"):
        mh.evaluate(run, data=tmp_path / "bad.csv")
    assert mh.evaluate(run, data=tmp_path / "bad.csv", on_error="skip:1")["accuracy"] > 0
    with pytest.raises(DataError, match="no column 'clicked', which is the label"):
        mh.evaluate(run, data=folder / "test.csv")
    with pytest.raises(RequestError, match="prepare these files with --like"):
        mh.evaluate(run, data=other, engine="ray://somewhere:6379")
    command = [sys.executable, "-m", "manyhands", "evaluate", str(run), "--data", str(other)]
    ended = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=120)
    assert json.loads(ended.stdout) == pytest.approx(found), ended.stderr


def test_values_that_encoders_do_not_know_are_pointed_out(folder: Path, tmp_path: Path) -> None:
    table = csv.read_csv(folder / "train.csv")
    users = pa.array(["nobody" if i % 4 else u for i, u in enumerate(table["user"].to_pylist())])
    place = table.column_names.index("user")
    csv.write_csv(table.set_column(place, "user", users), tmp_path / "new.csv")
    told = "feature 'user': 300 of 400 values were not there .*for example 'nobody'"
    with pytest.warns(UserWarning, match=told):
        scores = mh.predict(folder / "run", tmp_path / "new.csv", score=True, workers=2).scores
    with pytest.warns(UserWarning, match=told):
        assert mh.evaluate(folder / "run", data=tmp_path / "new.csv") == pytest.approx(scores)


def test_a_run_predicts_where_its_data_is_gone(folder: Path, tmp_path: Path) -> None:
    before = mh.predict(folder / "run", folder / "test.csv").table
    (folder / "data").rename(folder / "away")
    try:
        assert mh.predict(folder / "run", folder / "test.csv").table == before
    finally:
        (folder / "away").rename(folder / "data")


def test_whatever_is_encoded_is_encoded_as_in_training(launcher: Launcher, tmp_path: Path) -> None:
    """Packed numbers, words of different lengths, dates, gaps, weights of classes, a transform."""
    words = ("red", "green", "blue", "very", "small")
    lines = ["a,b,said,when,rank"]
    for k in range(120):
        said = " ".join(words[(k * j) % 5] for j in range(1, 2 + k % 4))
        gap = "" if k % 17 == 3 else f"{k % 11}"
        lines.append(f"{gap},{k * 0.5},{said},2024-0{1 + k % 9}-1{k % 9},{'abc'[k % 3]}")
    _written(tmp_path / "raw.csv", "\n".join(lines) + "\n")
    mh.prepare(
        tmp_path / "raw.csv",
        tmp_path / "data",
        label="rank",
        pack={"x": "a,b"},
        encode={"said": "words", "when": "dates"},
        types={"when": "time"},
        balance="weight",
    )

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = torch.nn.Embedding(30, 4), torch.nn.Linear(13, 3)

        def forward(self, b: Any) -> torch.Tensor:
            seen = torch.arange(b["said"].shape[1]) < b["said_length"][:, None]
            said = (self.words(b["said"]) * seen[..., None]).sum(1)
            return self.head(torch.cat([b["x"], said, b["when"]], 1)) * b["weight"][:, None]

    task = mh.Task(
        model=Net,
        loss=lambda m, b: torch.nn.functional.cross_entropy(m(b), b["rank"]),
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
        data=mh.prepared(tmp_path / "data", transform=lambda b, draw: {**b, "x": b["x"] * 2}),
        predict=lambda m, b: m(b),
    )
    settings = ["train.batch=32", "train.micro_batch=16", "train.steps=3"]
    run = tmp_path / "run"
    mh.train(task, to=run, workers=1, settings=settings, quiet=True, launcher=launcher)
    held = mh.predict(run, task=task).table
    raw = mh.predict(run, tmp_path / "raw.csv", task=task, on_error="fail").table
    there = raw.take(held.column("record"))
    assert there.column("prediction") == held.column("prediction") and held.num_rows > 10
    for name in ("probability", "p_a", "p_b", "p_c"):
        found, expected = (t.column(name).to_numpy() for t in (there, held))
        assert found == pytest.approx(expected, abs=1e-5)


def test_tasks_whose_data_is_columns(launcher: Launcher, tmp_path: Path) -> None:
    task = make("cnn")
    task = mh.Task(**{**vars(task), "predict": lambda m, b: (m(b["x"]), b["y"]), "held_out": 0.2})
    to = tmp_path / "run"
    settings = ["train.batch=32", "train.micro_batch=16", "train.steps=2"]
    report = mh.train(task, to=to, workers=1, settings=settings, quiet=True, launcher=launcher)
    held = mh.predict(to, task=task, batch=8)
    assert held.records == 20 and held.table.column_names == ["record", "prediction", "error"]
    model = report.load()
    numbers = held.table.column("record").to_pylist()
    with torch.no_grad():
        expected = model(task.data["x"][numbers])
    assert torch.allclose(
        torch.tensor(held.table.column("prediction").to_pylist()), expected, atol=1e-5
    )
    given = {name: column[:5] for name, column in task.data.items()}
    named = mh.predict(to, given, task=task, classes="a,b,c,d,e", to=tmp_path / "o.csv")
    best = model(given["x"]).argmax(1).tolist()
    assert [r["prediction"] for r in rows(tmp_path / "o.csv")] == ["abcde"[k] for k in best]
    assert named.records == 5
    mh.predict(to, given, task=task, to=tmp_path / "p.csv")
    assert list(rows(tmp_path / "p.csv")[0]) == ["record", "p0", "p1", "p2", "p3", "p4", "error"]
    with pytest.raises(DataError, match="no encoders that could read files"):
        mh.predict(to, "some.csv", task=task)
    with pytest.raises(TaskError, match="says nothing of how to predict"):
        mh.predict(to, given, task=make("cnn"))
    failing = mh.Task(**{**vars(task), "predict": lambda m, b: b["nothing"]})
    with pytest.raises(
        RunFailed, match=r"(?s)predicting records 0 to 4 of the data failed.*nothing"
    ):
        mh.predict(to, given, task=failing)


def test_a_killed_process_costs_nothing_but_time(folder: Path, tmp_path: Path) -> None:
    calm = mh.predict(folder / "run", big(folder), to=tmp_path / "calm.csv", memory="1MB")
    done, killed = threading.Event(), list[int]()

    def kill_one() -> None:
        while not done.is_set():
            for child in _children(os.getpid()):
                if _is_predicting(child):
                    os.kill(child, signal.SIGKILL)
                    killed.append(child)
                    return
            time.sleep(0.01)

    killer = threading.Thread(target=kill_one)
    killer.start()
    try:
        found = mh.predict(
            folder / "run", big(folder), to=tmp_path / "rough.csv", workers=2, memory="1MB"
        )
    finally:
        done.set()
        killer.join()
    assert killed and found.records == calm.records
    assert (tmp_path / "rough.csv").read_bytes() == (tmp_path / "calm.csv").read_bytes()


def _children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _is_predicting(pid: int) -> bool:
    """A spawned process, not the tracker of resources."""
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes()
        return b"spawn_main" in line and "libtorch_cpu" in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk_leaves_no_half_file(folder: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "none", str(disk)], check=True)
    write_clicks(tmp_path / "some.csv", 5000, label=False)
    try:
        command = [sys.executable, "-m", "manyhands", "predict", str(folder / "run")]
        command += [str(tmp_path / "some.csv"), "--to", str(disk / "out.csv")]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert ended.returncode == 1 and "the disk is full: writing" in ended.stderr, ended.stderr
        assert str(disk / "out.csv") in ended.stderr and os.listdir(disk) == []
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_ctrl_c_leaves_no_half_file(folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "manyhands", "predict", str(folder / "run"), str(big(folder))]
    command += ["--to", str(tmp_path / "out.csv"), "--batch", "1"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        while not list(tmp_path.glob(".out.csv*")):
            assert process.poll() is None, "it ended before it could be interrupted"
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130 and "Traceback" not in said
    assert os.listdir(tmp_path) == []


def test_the_command(folder: Path, tmp_path: Path) -> None:
    bad = _written(tmp_path / "bad.csv", "id,user,age,hour\n1,u1,30,3\n2,u2,old,3\n")
    command = [sys.executable, "-m", "manyhands", "predict", str(folder / "run"), str(bad)]
    to = ["--to", str(tmp_path / "out.jsonl"), "--json"]
    ended = subprocess.run([*command, *to], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1 and "'old' is no" in ended.stderr
    told = json.loads(ended.stdout)
    assert (told["records"], told["bad"]) == (2, 1)
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert lines[0]["prediction"] in ("yes", "no") and lines[1]["prediction"] is None
    assert {"p_yes", "p_no", "error", "record", "id"} <= lines[0].keys()
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2 and "--to" in ended.stderr


@pytest.mark.parametrize(
    ("made", "meaning"),
    [
        (lambda x: torch.nn.functional.linear(x, x)[:, 0], "logits"),
        (lambda x: torch.nn.functional.linear(x, x, x[:, 0]).squeeze(1)[:, 0:1], "logits"),
        (lambda x: torch.sigmoid(x @ x.T)[:, :1].reshape(-1), "probabilities"),
        (lambda x: torch.softmax(x, 1)[:, 1], "probabilities"),
        (lambda x: 1 / (1 + torch.exp(-x[:, 0])), "numbers"),
        (lambda x: (torch.sigmoid(x) * torch.sigmoid(x))[:, 0], "numbers"),
        (lambda x: x.detach()[:, 0], "numbers"),
    ],
)
def test_what_one_number_for_two_classes_means(made: Any, meaning: str) -> None:
    assert meaning_of(made(torch.randn(3, 3, requires_grad=True))) == meaning


def test_names_of_predictions() -> None:
    two = Naming(("no", "yes"), "logits")
    found = two.columns(torch.tensor([[2.0], [-1.0], [0.0]]))
    assert found["prediction"].to_pylist() == ["yes", "no", "no"]
    assert found["probability"].to_pylist() == pytest.approx([0.8808, 0.7311, 0.5], abs=1e-4)
    plain = Naming(("no", "yes"), "numbers").columns(torch.tensor([0.5]))
    assert plain["prediction"].to_pylist() == [0.5] and len(plain) == 1
    three = Naming(("a", "b", "c"))
    logits = torch.tensor([[0.0, 3.0, 1.0], [0.2, 0.2, 0.6]])
    found = three.columns(logits)
    assert found["prediction"].to_pylist() == ["b", "c"]
    assert found["p_c"].to_pylist()[1] == pytest.approx(0.6), "a distribution is left as it is"
    assert three.columns(torch.tensor([2, 0, -100]))["prediction"].to_pylist() == ["c", "a", None]
    lost = three.columns(torch.full((1, 3), torch.nan))["prediction"]
    assert lost.to_pylist() == [None], "not a number is no class"
    assert two.columns(torch.tensor([torch.nan]))["prediction"].to_pylist() == [None]
    many = Naming(tuple(range(11)))
    assert list(many.columns(torch.zeros(1, 11))) == ["prediction", "probability"]
    assert len(Naming(tuple(range(11)), None, True).columns(torch.zeros(1, 11))) == 13
    nested = Naming().columns({"a": torch.zeros(2, 2, 3), "b": torch.ones(2, dtype=torch.bfloat16)})
    assert nested["a"].to_pylist()[1] == [[0.0] * 3] * 2 and nested["b"].to_pylist() == [1.0, 1.0]
