"""Values are what was written: whole numbers are never rounded, missing ones are told alike."""

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import manyhands as mh
from manyhands.data.shards.manifest import read_manifest
from manyhands.data.shards.shard_formats import read_table
from manyhands.data.tfrecord.framing import frame
from manyhands.data.tfrecord.write_examples import encode

BEYOND = [2**63 + 3 * i for i in range(200)]
ROUNDED = [2**53 + 1 + 2 * i for i in range(200)]


def read_ids(folder: Path) -> tuple[str, list[Any]]:
    """The type of `id` as it was read, and what it is in shards."""
    manifest = read_manifest(folder)
    (kind,) = [c.type for c in manifest.raw if c.name == "id"]
    tables = [
        read_table(folder / shard.file, manifest.schema)
        for split in manifest.splits.values()
        for shard in split.shards
    ]
    return kind, pa.concat_tables(tables)["id"].to_pylist()


def as_csv(path: Path, ids: list[Any]) -> Path:
    rows = [f"{'' if v is None else v},{i % 7}" for i, v in enumerate(ids)]
    path.write_text("id,x\n" + "\n".join(rows) + "\n")
    return path


def as_json(path: Path, ids: list[Any]) -> Path:
    rows = [json.dumps({"id": v, "x": i % 7}) for i, v in enumerate(ids)]
    path.write_text("\n".join(rows) + "\n")
    return path


@pytest.mark.parametrize("write", [as_csv, as_json])
@pytest.mark.parametrize(
    ("ids", "kind"),
    [
        (BEYOND, "string"),
        ([-v for v in BEYOND], "string"),
        ([*BEYOND, None], "string"),
        (ROUNDED, "int64"),
        ([*ROUNDED, None], "int64"),
        ([*ROUNDED, 1.5], "string"),
        ([1, 2, 1.5, 1e300, 10**20], "float64"),
    ],
)
def test_whole_numbers_are_never_rounded(
    tmp_path: Path, write: Any, ids: list[Any], kind: str
) -> None:
    source = write(tmp_path / f"rows.{'csv' if write is as_csv else 'jsonl'}", ids)
    mh.prepare([source], tmp_path / "out", id="id", workers=1, split="none")
    read_as, found = read_ids(tmp_path / "out")
    assert read_as == kind
    if kind == "float64":
        assert sorted(found) == sorted(map(float, ids))
    else:
        there = [v for v in ids if v is not None]
        missing = {"" if kind == "string" else -1} if len(there) < len(ids) else set[Any]()
        written = {str(v) if kind == "string" else v for v in there}
        assert set(found) == written | missing


def test_pieces_of_whole_numbers_and_of_fractions_are_joined_exactly(tmp_path: Path) -> None:
    first = as_csv(tmp_path / "a.csv", ROUNDED)
    second = as_csv(tmp_path / "b.csv", [1.5, 2.5])
    mh.prepare([first, second], tmp_path / "out", id="id", workers=1, split="none")
    kind, found = read_ids(tmp_path / "out")
    assert kind == "string" and set(found) == {*map(str, ROUNDED), "1.5", "2.5"}


def test_a_type_that_is_said_is_taken(tmp_path: Path) -> None:
    source = as_csv(tmp_path / "a.csv", BEYOND)
    how: dict[str, Any] = {"types": {"id": "float"}, "id": "id", "workers": 1, "split": "none"}
    mh.prepare([source], tmp_path / "out", **how)
    assert read_ids(tmp_path / "out")[0] == "float64"


@pytest.mark.parametrize(
    ("ids", "kind"),
    [
        (pa.array(BEYOND, pa.uint64()), "string"),
        (pa.array(ROUNDED, pa.uint64()), "int64"),
        (pa.array([Decimal(v) for v in BEYOND], pa.decimal128(38, 0)), "string"),
        (pa.array([Decimal(v) for v in ROUNDED], pa.decimal128(38, 0)), "int64"),
        (pa.array([Decimal(v) / 100 for v in ROUNDED], pa.decimal128(38, 2)), "string"),
        (pa.array([Decimal(v) / 100 for v in range(9)], pa.decimal128(12, 2)), "float64"),
    ],
)
def test_numbers_of_parquet_are_never_rounded(tmp_path: Path, ids: pa.Array, kind: str) -> None:
    table = pa.table({"id": ids, "x": [i % 7 for i in range(len(ids))]})
    pq.write_table(table, tmp_path / "a.parquet")
    mh.prepare([tmp_path / "a.parquet"], tmp_path / "out", id="id", workers=1, split="none")
    read_as, found = read_ids(tmp_path / "out")
    assert read_as == kind
    exact: dict[str, Any] = {"string": str, "int64": int, "float64": float}
    assert set(found) == {exact[kind](v) for v in ids.to_pylist()}


def test_numbers_of_python_are_never_rounded(tmp_path: Path) -> None:
    for name, ids in (("beyond", BEYOND), ("mixed", [*ROUNDED, 1.5])):
        rows = ({"id": v, "x": i % 7} for i, v in enumerate(ids))
        mh.prepare(rows, tmp_path / name, id="id", workers=1, split="none")
        kind, found = read_ids(tmp_path / name)
        assert kind == "string" and set(found) == set(map(str, ids))


# ---- missing


WORDS = ["Private", "?", "NA", " None ", "", "State", "n/k", "Private"]
"""Of these, six are missing."""


def missing_rows(tmp_path: Path, kind: str) -> Any:
    """The same records in a file of this kind."""
    draw = [WORDS[i % len(WORDS)] for i in range(200)]
    ages = ["?" if i % 5 == 0 else str(20 + i % 50) for i in range(200)]
    table = pa.table({"work": draw, "age": ages, "y": [i % 3 for i in range(200)]})
    path = tmp_path / f"rows.{kind}"
    match kind:
        case "csv":
            lines = [f'"{r["work"]}",{r["age"]},{r["y"]}' for r in table.to_pylist()]
            path.write_text("work,age,y\n" + "\n".join(lines) + "\n")
        case "jsonl":
            path.write_text("\n".join(map(json.dumps, table.to_pylist())) + "\n")
        case "parquet":
            pq.write_table(table, path)
        case "arrow":
            with pa.ipc.new_file(str(path), table.schema) as writer:
                writer.write_table(table)
        case "tfrecord":
            path.write_bytes(frame(*encode(table)).tobytes())
        case _:
            return table.to_pylist()
    return [path]


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet", "arrow", "tfrecord", "python"])
def test_the_same_words_mean_missing_in_every_format(tmp_path: Path, kind: str) -> None:
    made = mh.prepare(
        missing_rows(tmp_path, kind),
        tmp_path / "out",
        label="y",
        types={} if kind == "jsonl" else {"age": "int"},  # a text in JSON is no number
        null=["n/k"],
        split="none",
        workers=1,
    )
    assert sorted(made.encoders["work"]["values"]) == ["Private", "State"]
    assert made.statistics["work"]["missing"] == 125
    assert made.statistics["age"]["missing"] == 40
    assert made.statistics["age"]["count"] == 160


def test_text_in_a_text_file_is_what_it_is(tmp_path: Path) -> None:
    source = tmp_path / "lines.txt"
    source.write_text("None\nNA\n?\nwords\n" * 30)
    made = mh.prepare([source], tmp_path / "out", input_format="text", split="none", workers=1)
    assert made.statistics["text"]["missing"] == 0
