"""Pages about prepared data: they fit a terminal, and say what leaks."""

from dataclasses import replace

import pytest

from manyhands.monitor.data_pages import show_data, show_records
from manyhands.values.data_summary import ColumnSummary, DataSummary, LeakageSummary, SplitSummary

SHARED = {"ids": 0, "contents": 0, "groups": 0}
LABELS = {f"a label [red] with a very long name, number {i}": (9**i, i, 0) for i in range(40)}
FOLDS = tuple(f"fold{i}" for i in range(20))


def summary(leakage: LeakageSummary) -> DataSummary:
    told = {"count": 3, "missing": 1200, "least": 0.12345, "most": 7, "mean": 3.0}
    return DataSummary(
        folder="a/[b]",
        format="arrow",
        split="ratio=0.8",
        seed=0,
        folds=0,
        raw_records=4000,
        skipped=7,
        notes=("a note " * 30,),
        hints=("hint: one",),
        leakage=leakage,
        splits=(SplitSummary("train", 3000, 31_800, 2), SplitSummary("test", 993, 999, 1)),
        columns=(ColumnSummary("a very long name " * 5, "feature", "int64", "x", told),),
        encoded_columns=("x",),
    )


@pytest.mark.parametrize(
    ("leakage", "says"),
    [
        (
            LeakageSummary(("train", "valid", "test"), SHARED, LABELS, ""),
            "no record is in two splits",
        ),
        (LeakageSummary(FOLDS, {**SHARED, "ids": 3}, {"x": tuple(range(20))}, "Mend"), "LEAKAGE"),
    ],
)
def test_a_page_fits_and_says_what_leaks(
    leakage: LeakageSummary, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    show_data(summary(leakage))
    text = capsys.readouterr().out
    assert says in text and leakage.advice in text
    assert max(map(len, text.splitlines())) <= 100
    assert "a/[b]  arrow, 3,993 records, 32.8 kB, split ratio=0.8, seed 0" in text
    assert "7 of 4,000 records were left out" in text and "a note" in text
    assert "0.1235 to 7, mean 3" in text and "1,200" in text


def test_notes_are_not_said_twice(capsys: pytest.CaptureFixture[str]) -> None:
    show_data(summary(LeakageSummary(("train",), SHARED, {}, "")), notes=False)
    text = capsys.readouterr().out
    assert "a note" not in text and "hint: one" in text


def test_records_are_cut_to_fit(capsys: pytest.CaptureFixture[str]) -> None:
    record = {"x": [1.23456, *range(9)], "image": b"123", "text": "long " * 30}
    show_records("test", ["x", "image", "text", "gone"], [record, {}])
    text = capsys.readouterr().out
    assert "first records of test" in text and "3 bytes" in text and "[1.235, 0, 1, 2" in text
    assert max(map(len, text.splitlines())) <= 100


def test_what_records_say_reaches_no_terminal_raw(capsys: pytest.CaptureFixture[str]) -> None:
    odd = "\x1b[2J\x1b[31mred\x07"
    leakage = LeakageSummary(("train",), SHARED, {odd: (3,)}, f"Mend {odd}")
    told = {"common values": {odd: 3}, "distinct values": 1}
    column = ColumnSummary(odd, "feature", "string", "x", told)
    show_data(replace(summary(leakage), notes=(odd,), columns=(column,)))
    show_records("train", [odd], [{odd: odd}])
    text = capsys.readouterr().out
    assert "\x1b" not in text and "\x07" not in text and text.count(r"\x1b[2J") >= 6
