"""A forecaster as it is written for Lightning: a DataModule with a random split, an LSTM, metrics
logged in both steps, a rate that is stepped with every step. Lightning's own Trainer, given the
records in the same order, comes to the same weights and scores."""

# pyright: basic

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset, TensorDataset, random_split
from torchmetrics import MeanAbsoluteError, MeanSquaredError, MetricCollection

import manyhands as mh
from manyhands.launch.engines.launcher import Launcher
from manyhands.values.planned_faults import FaultPlan
from tests.adapters.test_hf_honoured import OurOrder


class Series(pl.LightningDataModule):
    def __init__(
        self, *, drop_last: bool = False, ours: bool = False, first: int | None = None
    ) -> None:
        super().__init__()
        self.drop_last, self.ours, self.first = drop_last, ours, first

    def setup(self, stage: str) -> None:
        t = torch.arange(200) / 7
        windows = (torch.sin(t) + 0.1 * torch.cos(5 * t)).unfold(0, 13, 1)
        whole = TensorDataset(windows[:, :12, None].clone(), windows[:, 12].clone())
        draw = torch.Generator().manual_seed(1)
        train, self.val = random_split(whole, [0.8, 0.2], generator=draw)
        self.train = Subset(train, range(self.first or len(train)))

    def train_dataloader(self) -> Any:
        """151 records: 18 batches of 8, and 7 records."""
        order = {"sampler": OurOrder(0, len(self.train))} if self.ours else {"shuffle": True}
        return DataLoader(self.train, batch_size=8, drop_last=self.drop_last, **order)

    def val_dataloader(self) -> Any:
        return DataLoader(self.val, batch_size=16)


class Forecast(pl.LightningModule):
    def __init__(self, lr: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lstm, self.head = nn.LSTM(1, 8, batch_first=True), nn.Linear(8, 1)
        self.error = MeanAbsoluteError()
        both = {"mae": MeanAbsoluteError(), "mse": MeanSquaredError()}
        self.errors = MetricCollection(both, prefix="val_")

    def forward(self, x: Any) -> Any:
        return self.head(self.lstm(x)[0][:, -1])[:, 0]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        said = self(x)
        self.error(said, y)
        self.log("train_mae", self.error, on_step=True, on_epoch=False)
        return F.mse_loss(said, y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.errors.update(self(x), y)
        self.log_dict(self.errors)
        self.log("val_loss", F.mse_loss(self(x), y), prog_bar=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        steps = int(self.trainer.estimated_stepping_batches)
        rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.hparams.lr, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": rate, "interval": "step"}}


@pytest.mark.parametrize(
    ("given", "data", "steps", "short"),
    [
        ({"gradient_clip_val": 0.1}, {}, 38, False),
        ({"accumulate_grad_batches": 6}, {"drop_last": True}, 6, False),
        ({"accumulate_grad_batches": 4}, {"drop_last": True}, 10, True),
        ({"accumulate_grad_batches": 2}, {"drop_last": True, "first": 24}, 4, True),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_trainer_itself_comes_to_the_same(
    given: dict[str, Any],
    data: dict[str, Any],
    steps: int,
    short: bool,
    launcher: Launcher,
    tmp_path: Path,
) -> None:
    """`short`: the last step of an epoch has fewer batches, and Lightning divides them as if it had
    all. There the weights differ; records and steps do not."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        first = Forecast()
    task, config = mh.from_lightning(first, Series(**data), max_epochs=2, **given)
    prints = set()
    for workers in (1, min(3, given.get("accumulate_grad_batches", 3))):
        faults = FaultPlan().kill(rank=1, at_step=3, at="update") if workers > 1 else FaultPlan()
        found = mh.train(
            task,
            config=config,
            to=tmp_path / str(workers),
            workers=workers,
            quiet=True,
            launcher=launcher,
            faults=faults,
        )
        prints.add(found.fingerprint)
    assert len(prints) == 1 and found.step == steps
    theirs = pl.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **given,
    )
    theirs.fit(first, Series(**data, ours=True))
    assert theirs.global_step == steps
    assert len(task.data.sampler) == 8 * theirs.num_training_batches or not data
    if short:
        return
    expected = {n: float(v) for n, v in theirs.callback_metrics.items() if n.startswith("val")}
    assert expected.keys() == {"val_mae", "val_mse", "val_loss"}
    for name, value in expected.items():
        assert found.scores[name] == pytest.approx(value, rel=1e-5)
    weights, state = load_file(found.weights), first.state_dict()
    for name in weights:
        torch.testing.assert_close(weights[name], state[name].detach(), rtol=1e-5, atol=1e-6)
