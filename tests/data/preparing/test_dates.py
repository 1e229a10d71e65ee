"""Does 03/04/2024 begin with the day? All values of a column decide, or somebody is asked."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import manyhands as mh
from manyhands.data.encoding.encoders import Encoders
from manyhands.data.shards.manifest import read_manifest
from manyhands.data.shards.shard_formats import read_table
from manyhands.values.errors import DataError
from tests.data.preparing.test_pipeline import digest

ROWS = 3000
BOTH = ["03/04/2024", "05/06/2024", "07/07/2024"]


def files_of(folder: Path, decisive: str, *, format: str = "csv", at: int = ROWS - 1) -> list[str]:
    """Two files of dates that can be read both ways, and one value that can not."""
    folder.mkdir()
    dates = [BOTH[i % 3] for i in range(ROWS)]
    if decisive:
        dates[at] = decisive
    made: list[str] = []
    for part in range(2):
        some = range(part * ROWS // 2, (part + 1) * ROWS // 2)
        path = folder / f"{part}.{format}"
        if format == "csv":
            lines = ["n,when,y", *(f"{i},{dates[i]},{i % 2}" for i in some)]
            path.write_text("\n".join(lines) + "\n")
        elif format == "jsonl":
            lines = [json.dumps({"n": i, "when": dates[i], "y": i % 2}) for i in some]
            path.write_text("\n".join(lines) + "\n")
        else:
            whens = [dates[i] for i in some]
            table = pa.table({"n": list(some), "when": whens, "y": [i % 2 for i in some]})
            pq.write_table(table, path, row_group_size=500)
        made.append(str(path))
    return made


def whens(folder: Path) -> dict[int, datetime]:
    """What each record's date was read as."""
    manifest = read_manifest(folder)
    tables = [
        read_table(folder / shard.file, manifest.schema)
        for split in manifest.splits.values()
        for shard in split.shards
    ]
    rows = pa.concat_tables(tables).select(["n", "when"]).to_pylist()
    start = datetime(1970, 1, 1)
    return {
        r["n"]: start + (datetime.fromtimestamp(r["when"] / 1e6) - datetime.fromtimestamp(0))
        for r in rows
    }


def prepared(sources: Any, to: Path, kind: str = "time", **more: Any) -> Path:
    settings: dict[str, Any] = {"encode": {"when": "raw:int64", "n": "raw:int64"}, "split": "none"}
    mh.prepare(sources, to, label="y", types={"when": kind}, **({"workers": 1} | settings | more))
    return to


@pytest.mark.parametrize("format", ["csv", "jsonl", "parquet"])
@pytest.mark.parametrize("at", [0, ROWS - 1])
def test_one_value_decides_for_all_files(tmp_path: Path, format: str, at: int) -> None:
    sources = files_of(tmp_path / "raw", "13/04/2024", format=format, at=at)
    folder = prepared(sources, tmp_path / "one")
    found = whens(folder)
    assert found[3] == datetime(2024, 4, 3) and found[at] == datetime(2024, 4, 13)
    assert {c.name: c.type for c in read_manifest(folder).raw}["when"] == "time:dmy"
    small = prepared(sources[::-1], tmp_path / "two", memory="1MB")
    assert {datetime(2024, 4, 3), datetime(2024, 6, 5)} <= {*whens(small).values()}


def test_the_same_bytes_on_one_and_two_processes(tmp_path: Path) -> None:
    sources = files_of(tmp_path / "raw", "04/13/2024")
    one = prepared(sources, tmp_path / "one", workers=1)
    two = prepared(sources, tmp_path / "two", workers=2)
    assert digest(one) == digest(two)
    assert whens(one)[3] == datetime(2024, 3, 4)


def test_what_was_decided_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepared(files_of(tmp_path / "raw", "13/04/2024"), tmp_path / "out", quiet=False)
    said = " ".join(capsys.readouterr().err.split())
    assert "column 'when': the day comes first in 13/04/2024 (so in 03/04/2024 too)" in said
    assert "--type when=time:mdy" in said


@pytest.mark.parametrize(
    ("format", "workers"), [("csv", 1), ("csv", 2), ("jsonl", 1), ("parquet", 1)]
)
def test_where_no_value_decides_somebody_is_asked(
    tmp_path: Path, format: str, workers: int
) -> None:
    sources = files_of(tmp_path / "raw", "", format=format)
    with pytest.raises(DataError, match="'when': does 03/04/2024 begin with the day") as refused:
        prepared(sources, tmp_path / "out", workers=workers)
    assert "--type when=time:dmy" in str(refused.value)
    if workers == 1:
        day = whens(prepared(sources, tmp_path / "out", "time:dmy"))
        month = whens(prepared(sources, tmp_path / "mdy", "date:mdy"))
        form = whens(prepared(sources, tmp_path / "form", "time:%d/%m/%Y"))
        assert (day[0], month[0]) == (datetime(2024, 4, 3), datetime(2024, 3, 4)) and form == day


def test_values_that_contradict_each_other_are_named(tmp_path: Path) -> None:
    sources = files_of(tmp_path / "raw", "13/04/2024")
    first = Path(sources[0])
    first.write_text(first.read_text().replace("\n0,03/04/2024", "\n0,04/13/2024"))
    with pytest.raises(DataError, match="13/04/2024, and the month in 04/13/2024"):
        prepared(sources, tmp_path / "out", workers=2)
    with pytest.raises(DataError, match=r"record 1, .*'04/13/2024' is no time:dmy"):
        prepared(sources, tmp_path / "out", "time:dmy")
    left = prepared(sources, tmp_path / "out", "time:dmy", on_error="skip:1")
    assert len(whens(left)) == ROWS - 1


def test_dates_mean_the_same_later_and_when_serving(tmp_path: Path) -> None:
    first = prepared(files_of(tmp_path / "raw", "13/04/2024"), tmp_path / "first")
    later = files_of(tmp_path / "more", "")
    mh.prepare(later, tmp_path / "later", like=first, workers=1)
    assert whens(tmp_path / "later")[0] == datetime(2024, 4, 3)
    encoders = Encoders.load(read_manifest(first).encoders)
    served = encoders.apply({"n": [1], "when": ["03/04/2024"]}).column("when").to_pylist()
    assert served == [1712102400000000] == [whens(first)[0].timestamp() * 1e6]
    with pytest.raises(DataError, match="'04/13/2024' is none"):
        encoders.apply({"n": [1], "when": ["04/13/2024"]})


def test_text_stays_text_in_data_that_comes_later(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("zip,y\n" + "007,0\n00A,1\n" * 50)
    (tmp_path / "b.csv").write_text("zip,y\n" + "007,0\n008,1\n" * 50)
    mh.prepare(tmp_path / "a.csv", tmp_path / "a", label="y", split="none", workers=1)
    mh.prepare(tmp_path / "b.csv", tmp_path / "b", like=tmp_path / "a", workers=1)
    manifest = read_manifest(tmp_path / "b")
    shards = [s.file for split in manifest.splits.values() for s in split.shards]
    found = {
        v
        for f in shards
        for v in read_table(tmp_path / "b" / f, manifest.schema)["zip"].to_pylist()
    }
    assert len(found) == 2 and max(found) > 1  # 007 is known, 008 is not


@pytest.mark.parametrize("format", ["jsonl", "mixed.jsonl", "parquet"])
def test_numbers_are_read_in_the_form_that_is_said(tmp_path: Path, format: str) -> None:
    path = tmp_path / f"a.{format}"
    rows: list[dict[str, Any]] = [{"n": i, "when": 20150101 + i, "y": i % 2} for i in range(20)]
    if format == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        rows[3]["when"] = "20150104" if format == "mixed.jsonl" else rows[3]["when"]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = prepared(path, tmp_path / "out", "time:%Y%m%d")
    assert whens(folder) == {i: datetime(2015, 1, 1 + i) for i in range(20)}
    encoders = Encoders.load(read_manifest(folder).encoders)
    served = encoders.apply({"n": [1], "when": [20150101]}).column("when").to_pylist()
    assert served == [1420070400000000]


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_a_fraction_has_no_form(tmp_path: Path, format: str) -> None:
    path = tmp_path / f"a.{format}"
    dates = [20150101.5 if format == "parquet" or i == 3 else 20150101 for i in range(20)]
    rows = [{"n": i, "when": date, "y": i % 2} for i, date in enumerate(dates)]
    if format == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match=r"20150101\.5"):
        prepared(path, tmp_path / "out", "time:%Y%m%d")


def test_numbers_are_the_same_times_when_serving(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    given = [1420070400, 1420070400_000, 1420070400_000_000, 1420070400.5, None]
    rows = [{"n": i, "when": when, "y": i % 2} for i, when in enumerate(given)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = prepared(path, tmp_path / "out", missing={"when": "zero"})
    encoders = Encoders.load(read_manifest(folder).encoders)
    second = 1420070400_000_000
    expected = [second, second, second, second + 500_000, 0]
    for numbers in (given[:3], given):
        whole = {"n": range(len(numbers)), "when": numbers}
        for asked in (whole, pa.table({name: pa.array(c) for name, c in whole.items()})):
            served = encoders.apply(asked).column("when").to_pylist()
            assert served == expected[: len(numbers)]
    moments = [datetime(2015, 1, 1), datetime(2015, 1, 1).date()]
    for moment in moments:
        served = encoders.apply({"n": [1], "when": [moment]}).column("when").to_pylist()
        assert served == [second]


def test_text_without_a_letter_is_missing_when_serving(tmp_path: Path) -> None:
    folder = prepared(files_of(tmp_path / "raw", "13/04/2024"), tmp_path / "out")
    encoders = Encoders.load(read_manifest(folder).encoders)
    nothing = encoders.apply({"n": [None], "when": [None]})
    assert encoders.apply({"n": [""], "when": [" "]}).equals(nothing)


@pytest.mark.parametrize(
    ("dates", "form", "said"),
    [
        (["03/04/24", "28/04/24"], "time", "when=time:%d/%m/%y"),
        (["03.04.24", "28.04.24"], "time:dmy", "when=time:%d.%m.%y"),
        (["3-Apr-24", "28-Apr-24"], "time", "when=time:%d-%b-%y"),
        (["03/04/24 10:30"], "time", "when=time:%d/%m/%y (with its time: %d/%m/%y %H:%M)"),
        (["03/04/2024", "soon"], "time:dmy", ""),
        (["03/04/24"], "time:%d.%m.%y", ""),
    ],
)
@pytest.mark.parametrize("format", ["csv", "jsonl"])
def test_a_year_of_two_digits_is_told_what_it_needs(
    dates: list[str], form: str, said: str, format: str, tmp_path: Path
) -> None:
    rows = [{"n": i, "when": dates[i % len(dates)]} for i in range(50)]
    lines = ["n,when", *(f"{r['n']},{r['when']}" for r in rows)]
    source = tmp_path / f"a.{format}"
    source.write_text("\n".join(lines if format == "csv" else map(json.dumps, rows)) + "\n")
    with pytest.raises(DataError, match="bad records") as told:
        mh.prepare([source], tmp_path / "to", types={"when": form}, workers=1)
    first = str(told.value).splitlines()[1]
    hint = "; a year of two digits needs a format, as in --type "
    assert (hint + said in first) if said else (hint not in first), first
    if said and " (" not in said:
        given = said.removeprefix("when=")
        mh.prepare([source], tmp_path / "to", types={"when": given}, workers=1)
