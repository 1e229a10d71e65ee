"""A batch by the task's own collate; and records of which none can be made, in words."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

import manyhands as mh
from manyhands.data.open_data import open_data
from manyhands.data.reading.collate_items import why_not
from manyhands.launch.engines.launcher import Launcher
from manyhands.values.errors import ManyhandsError, TaskError
from tests.support.prepared_folders import mixed_table, write_folder

T = torch.zeros


@pytest.mark.parametrize(
    ("items", "says"),
    [
        ([T(3), T(3), T(2)], "record 30 has the shape (2,), where record 10 has the shape (3,)"),
        ([{"x": T(3)}, {"x": T(3), "y": 1}], "record 20 has the keys x, y, where"),
        ([{"a": [T(1), T(2)]}, {"a": [T(1), T(3)]}], "record 20['a'][1] has the shape (3,)"),
        ([(1, 2), (1, 2, 3)], "record 20 has the length 3, where record 10 has the length 2"),
        ([{"x": 1}, {"x": None}], "record 20['x'] is None, of which no batch can be made"),
        ([1, "a"], "record 20 is str, where record 10 is a number"),
        ([np.zeros(2), np.zeros(3)], "record 20 has the shape (3,)"),
        ([np.array(["a"])], "record 10 is an array of <U1"),
        ([T(1), Path("x")], "record 20 is of type PosixPath, of which no batch can be made"),
        ([T(1), 3], "record 20 is a number, where record 10 has the shape (1,)"),
    ],
)
def test_what_differs_is_named(items: list[Any], says: str) -> None:
    assert says in str(why_not(items, [10, 20, 30][: len(items)]))


def test_records_that_fit_together_are_not_blamed() -> None:
    items = [{"x": T(2), "t": "abc", "n": [1, (2.0, np.int64(3))]}, {"x": T(2), "t": "b", "n": [4, (True, 1)]}]  # fmt: skip  # noqa: E501
    assert why_not(items, [1, 2]) is None


def test_a_prepared_folder_has_no_collate(tmp_path: Path) -> None:
    write_folder(tmp_path / "made", {"train": [mixed_table(5)]})
    with pytest.raises(TaskError, match=r"prepared folder.*pad=, stack=, transform="):
        open_data(str(tmp_path / "made"), None, collates=(lambda records: records, None))


def test_many_at_once_must_be_as_many() -> None:
    class Few(list[int]):
        def __getitems__(self, ids: list[int]) -> Any:
            return [1]

    records, _ = open_data(Few([1, 2, 3]), None)
    with pytest.raises(TaskError, match=r"Few.__getitems__ was asked for 2 records and gave 1"):
        records.batch(np.arange(2))


SENTENCES = [torch.arange(1, 2 + i % 7) for i in range(40)]


def padded(records: list[Any]) -> dict[str, torch.Tensor]:
    return {
        "t": pad_sequence(records, batch_first=True),
        "n": torch.tensor(list(map(len, records))),
    }


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 2)

    def forward(self, batch: Any) -> torch.Tensor:
        return self.head(self.embed(batch["t"]).mean(1))


def by_length(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch), batch["n"] % 2)


def task(**changes: Any) -> mh.Task:
    given: dict[str, Any] = {
        "model": Bag,
        "loss": by_length,
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        "data": SENTENCES,
        "collate": padded,
        **changes,
    }
    return mh.Task(**given)


def test_held_out_records_are_collated_alike(launcher: Launcher, tmp_path: Path) -> None:
    found: list[Any] = []
    for workers in (1, 2):
        given = task(
            held_out=0.25,
            predict=lambda model, batch: (model(batch), batch["n"]),
            scores={"seen": lambda predictions, targets: targets.float().sum()},
        )
        report = mh.train(
            given,
            to=tmp_path / f"{workers}",
            workers=workers,
            settings=["train.batch=8", "train.micro_batch=2"],
            quiet=True,
            launcher=launcher,
        )
        found.append((report.fingerprint, report.scores))
        assert mh.evaluate(tmp_path / f"{workers}", given) == report.scores
    assert found[0] == found[1]
    _, held = open_data(SENTENCES, 0.25, collates=(padded, padded))
    assert held is not None
    expected = sum(len(SENTENCES[i]) for i in held.names(np.arange(10)))
    assert found[0][1]["seen"] == expected


def returns_nothing(records: list[Any]) -> None:
    padded(records)


@pytest.mark.parametrize("wrapped", [lambda f: f, partial], ids=["function", "partial"])
def test_a_collate_that_returns_nothing_is_told_by_name(
    wrapped: Any, launcher: Launcher, tmp_path: Path
) -> None:
    with pytest.raises(ManyhandsError) as caught:
        mh.train(
            task(collate=wrapped(returns_nothing)),
            to=tmp_path / "run",
            workers=2,
            settings=["train.batch=8", "train.micro_batch=2"],
            quiet=True,
            launcher=launcher,
        )
    line = returns_nothing.__code__.co_firstlineno
    place = f"collate ({__file__}:{line})"
    assert f"{place} returned None for 2 records; it must return the batch" in str(caught.value)


def test_a_collate_that_fails_names_its_records_and_the_line(
    launcher: Launcher, tmp_path: Path
) -> None:
    def fails(records: list[Any]) -> Any:
        if any(len(r) == 7 for r in records):
            raise ValueError("seven are too many")
        return padded(records)

    with pytest.raises(ManyhandsError) as caught:
        mh.train(
            task(collate=fails),
            to=tmp_path / "run",
            workers=2,
            settings=["train.batch=8", "train.micro_batch=2"],
            quiet=True,
            launcher=launcher,
        )
    said = str(caught.value)
    assert "ValueError: seven are too many" in said
    assert "test_collate_items.py" in said and 'raise ValueError("seven are too many")' in said
    records = said.split("records ")[1].splitlines()[0].split(", ")
    assert any(int(r.rstrip(".)")) % 7 == 6 for r in records) and len(records) <= 2
