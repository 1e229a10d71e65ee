"""A column that gives the label away is named, and no other."""

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import manyhands as mh
from manyhands.data.columns.hashing import hash_rows
from manyhands.data.shards.manifest import read_manifest
from manyhands.data.splitting.determined_label import determining, joined, sample_of
from tests.data.preparing.test_pipeline import digest


def people(count: int = 6000, **more: Any) -> dict[str, list[Any]]:
    """Honest columns of many kinds, and a label that they say something about, not everything."""
    draw = random.Random(0)
    label = [draw.choice("abc") for _ in range(count)]
    columns: dict[str, list[Any]] = {
        "key": [f"k{i}" for i in range(count)],
        "number": [draw.gauss(ord(y), 0.5) for y in label],
        "city": [draw.choice("uvwxyz") for _ in range(count)],
        "flag": [draw.random() < 0.5 for _ in range(count)],
        "user": [f"user{draw.randrange(count // 2)}" for _ in range(count)],
        "note": [" ".join(draw.choice(["good", "bad"]) for _ in range(9)) for _ in range(count)],
        "constant": [1] * count,
        "label": label,
    }
    return columns | {name: [make(y, draw) for y in label] for name, make in more.items()}


LEAKS: dict[str, Any] = {
    "code": lambda y, draw: ord(y),
    "word": lambda y, draw: {"a": "left", "b": "right", "c": "right?"}[y],
    "finer": lambda y, draw: f"{y}{draw.randrange(50)}",
    "score": lambda y, draw: ord(y) + draw.random() * 0.9,
}


def csv(path: Path, columns: dict[str, list[Any]]) -> Path:
    rows = zip(*columns.values(), strict=True)
    path.write_text(",".join(columns) + "\n" + "\n".join(",".join(map(str, r)) for r in rows))
    return path


def warned(folder: Path) -> set[str]:
    notes = read_manifest(folder).lineage["notes"]
    return {note.split("'")[1] for note in notes if "determines the label" in note}


def test_columns_that_determine_the_label_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = csv(tmp_path / "people.csv", people(**LEAKS))
    how: dict[str, Any] = {"label": "label", "memory": "2MB"}
    mh.prepare(source, tmp_path / "one", workers=1, quiet=False, **how)
    said = " ".join(capsys.readouterr().err.split())
    assert "column 'code' by itself determines the label 'label': in all 4,096 different" in said
    assert "--drop score" in said
    assert warned(tmp_path / "one") == set(LEAKS)
    mh.prepare(source, tmp_path / "two", workers=2, **how)
    assert digest(tmp_path / "one") == digest(tmp_path / "two")
    mh.prepare(source, tmp_path / "less", workers=1, label="label", drop=["code", "s*"], folds=2)
    assert warned(tmp_path / "less" / "fold-1") == {"word", "finer"}


@pytest.mark.parametrize("copies", [1, 3])
def test_honest_columns_are_no_false_alarm(tmp_path: Path, copies: int) -> None:
    """Neither are those whose values only come back because whole records do."""
    columns = {name: values * copies for name, values in people(2000).items()}
    mh.prepare(csv(tmp_path / "a.csv", columns), tmp_path / "out", label="label", workers=1)
    assert warned(tmp_path / "out") == set()


def test_a_number_that_is_the_label_in_another_unit(tmp_path: Path) -> None:
    draw = random.Random(0)
    fahrenheit = [draw.gauss(50, 20) for _ in range(500)]
    columns = {
        "celsius": [(f - 32) / 1.8 for f in fahrenheit],
        "nearly": [f + draw.gauss(0, 0.5) for f in fahrenheit],
        "missing": [-f if draw.random() < 0.9 else "" for f in fahrenheit],
        "fahrenheit": fahrenheit,
    }
    mh.prepare(csv(tmp_path / "a.csv", columns), tmp_path / "out", label="fahrenheit", workers=1)
    assert warned(tmp_path / "out") == {"celsius"}


def test_the_sample_does_not_depend_on_the_cuts() -> None:
    table = pa.table(people(6000, **LEAKS))
    inputs = [name for name in table.column_names if name != "label"]
    hashes = hash_rows(table, table.column_names)
    whole = sample_of(table, hashes, "label", inputs)
    for cuts in ([3000], [10, 20, 5990]):
        edges = [0, *cuts, len(table)]
        parts = [
            sample_of(table.slice(a, b - a), hashes[a:b], "label", inputs)
            for a, b in pairwise(edges)
        ][::-1]
        found = parts[0]
        for part in parts[1:]:
            found = joined(found, part)
        for name, values in whole.dump().items():
            assert np.array_equal(found.dump()[name], values, equal_nan=values.dtype.kind == "f")
    assert set(determining(whole, inputs)) == set(LEAKS)


def test_a_sample_is_kept_by_every_numpy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To older ones every keyword of savez is an array."""
    named: list[str] = []
    savez = np.savez

    def old(file: Any, **arrays: Any) -> None:
        named.extend(arrays)
        savez(file, **{name: np.asarray(array) for name, array in arrays.items()})

    monkeypatch.setattr(np, "savez", old)
    mh.prepare(pa.table(people(600)).to_pylist(), tmp_path / "out", label="label", workers=1)
    assert named and "allow_pickle" not in named
