"""`mh.Embedding(padding_idx=...)` is nn.Embedding's: beside it, in a plain loop."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import manyhands as mh
from manyhands.data.ordering.epoch_order import order
from manyhands.launch.engines.launcher import Launcher
from manyhands.training.compute.seeds import seed_everything
from manyhands.training.state.rows.row_init import FirstRows
from manyhands.values.errors import ConfigError
from tests.support.tasks import make, rate, ratings

PAD, ITEMS = 3, 30
SETTINGS = ["train.batch=32", "train.steps=10", "train.clip_norm=0.3"]

Go = Callable[..., mh.Report]


class Padded(nn.Module):
    def __init__(self, item: nn.Module | None = None) -> None:
        super().__init__()
        self.item = item or mh.Embedding(
            4000, 5, init=(-0.4, 0.4), optimizer="sgd", lr=0.3, padding_idx=PAD
        )
        self.head = nn.Linear(5, 1)

    def forward(self, user: Tensor, items: Tensor) -> Tensor:
        return self.head(torch.tanh(self.item(items).sum(1))).squeeze(1)


def some() -> dict[str, Tensor]:
    """Of one record all items are padding."""
    data = ratings()
    data["items"][::3, 1:] = PAD
    data["items"][7] = PAD
    return data


def task() -> mh.Task:
    return replace(
        make("rows"),
        model=Padded,
        data=some(),
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
        held_out=some(),
        predict=lambda m, b: (m(b["user"], b["items"]), b["y"]),
        scores={"error": lambda made, right: (made - right).square().mean()},
    )


@pytest.fixture
def go(tmp_path: Path, launcher: Launcher) -> Go:
    def run(*settings: str, workers: int = 1, name: str = "run") -> mh.Report:
        return mh.train(
            task(),
            to=tmp_path / name,
            workers=workers,
            settings=[*SETTINGS, *settings],
            quiet=True,
            launcher=launcher,
        )

    return run


def plain() -> Padded:
    """The steps in plain PyTorch, on an nn.Embedding with the same first values."""
    seed_everything(0, "model")
    model = Padded()  # before torch's own draws its rows
    first = FirstRows(mh.Embedding(1, 1, init=(-0.4, 0.4)).first, 5, seed=0, table="item")
    item, data = nn.Embedding(ITEMS, 5, padding_idx=PAD), some()
    zeros = item.weight[PAD].detach().clone()
    model.item = item
    with torch.no_grad():
        item.weight.copy_(torch.from_numpy(first(np.arange(ITEMS))))
        item.weight[PAD] = zeros
    groups = [{"params": item.parameters(), "lr": 0.3}, {"params": model.head.parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    for step in range(10):
        epoch, k = divmod(step, 8)
        records = torch.from_numpy(order(0, epoch, 256)[np.arange(32 * k, 32 * k + 32)])
        optimizer.zero_grad()
        rate(model, {name: column[records] for name, column in data.items()}).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
    return model


def test_it_is_trained_scored_and_loaded_as_torch_has_it(go: Go) -> None:
    report, expected = go("train.micro_batch=32"), plain()
    table = mh.open_table(report.run, "item")
    assert table["id"].to_pylist().count(PAD) == 0 and table.num_rows == ITEMS - 1
    trained = mh.load(report.run, task())
    ids = torch.arange(ITEMS)
    with torch.no_grad():
        torch.testing.assert_close(trained.item(ids), expected.item(ids), rtol=1e-5, atol=1e-6)
        assert torch.equal(trained.item(ids)[PAD], torch.zeros(5))
        torch.testing.assert_close(trained.head.weight, expected.head.weight)
        error = float(rate(expected, some()))
    assert report.scores["error"] == pytest.approx(error, rel=1e-4)
    assert mh.evaluate(report.run, task())["error"] == pytest.approx(error, rel=1e-4)


def test_the_bits_of_one_worker(go: Go) -> None:
    runs = [
        go("train.micro_batch=4", name="one"),
        go("train.micro_batch=4", workers=3, name="three"),
        go("train.micro_batch=4", "train.sync=alone", name="alone"),
    ]
    assert len({report.fingerprint for report in runs}) == 1


@pytest.mark.parametrize("shape", [(), (0,), (4,), (2, 3)])
@pytest.mark.parametrize("pads", [0.0, 0.5, 1.0])
def test_outside_a_run(shape: tuple[int, ...], pads: float) -> None:
    ids = torch.arange(10, 10 + int(np.prod(shape))).view(shape)
    ids = torch.where(torch.rand(shape) < pads, -1, ids)
    table, bare = mh.Embedding(100, 5, padding_idx=-1), mh.Embedding(100, 5)
    there = (ids != -1)[..., None]
    assert torch.equal(table(ids), torch.where(there, bare(ids), 0.0))


def test_padding_alone_can_be_backpropagated(go: Go) -> None:
    model = mh.load(go("train.micro_batch=32").run, task())
    made = model(torch.zeros(2, dtype=torch.int64), torch.full((2, 3), PAD))
    F.mse_loss(made, torch.ones(2)).backward()
    assert model.head.bias.grad is not None and model.item(torch.tensor([PAD])).requires_grad


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"padding_idx": 0.5}, "padding_idx=0.5 is no id"),
        ({"padding_idx": True}, "padding_idx=True is no id"),
        ({"padding_idx": 1 << 63}, "does not fit into 64 bits"),
        ({"max_norm": 1.0}, "has no max_norm.*normalize"),
        ({"max_norm": None}, "has no max_norm"),
        ({"scale_grad_by_freq": True}, "has no scale_grad_by_freq.*in the loss"),
        ({"sparse": True}, "has no sparse.*Leave it out"),
        ({"_weight": torch.ones(5, 2)}, "has no _weight.*train.start_from"),
        ({"_freeze": True}, "requires_grad_"),
        ({"dtype": torch.float64}, "rows are float32"),
    ],
)
def test_what_comes_from_torch_is_answered_by_name(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        mh.Embedding(5, 2, **given)
