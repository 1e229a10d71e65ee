# SPDX-License-Identifier: Apache-2.0
"""A LightningModule with two callbacks, as it was written for Lightning's Trainer.

The last lines stood as `Trainer(max_epochs=..., callbacks=...).fit(Digits(), loaders)`. Early
stopping and the best checkpoint become settings, the scores are what validation_step logs.

manyhands train examples/20_lightning.py --to runs/lit --workers 2
"""

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import manyhands as mh


class Digits(pl.LightningModule):
    def __init__(self, width: int = 128, lr: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(64, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 10)
        )
        self.accuracy = MulticlassAccuracy(10, average="micro")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x, y = batch
        scores = self.net(x)
        self.accuracy(scores, y)
        self.log("val_loss", F.cross_entropy(scores, y))
        self.log("val_acc", self.accuracy)

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.max_epochs)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule}}


def loaders() -> tuple[DataLoader, DataLoader]:
    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32) / 16
    y = torch.tensor(digits.target)
    train, val = TensorDataset(x[:1500], y[:1500]), TensorDataset(x[1500:], y[1500:])
    return DataLoader(train, batch_size=64, shuffle=True), DataLoader(val, batch_size=64)


task, config = mh.from_lightning(
    Digits,
    loaders(),
    max_epochs=10,
    gradient_clip_val=1.0,
    callbacks=[
        EarlyStopping("val_loss", patience=3),
        ModelCheckpoint(monitor="val_acc", mode="max"),
    ],
)
