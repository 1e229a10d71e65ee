"""LightningModules as tasks: the bits of plain PyTorch, on any number of workers, through kills; or
refused by name."""

# pyright: basic

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

import manyhands as mh
from manyhands.data.ordering.epoch_order import order
from manyhands.launch.engines.launcher import Launcher
from manyhands.stories.replay import replay
from manyhands.values.config import from_dict
from manyhands.values.errors import TaskError
from manyhands.values.loaded_task import load_task
from manyhands.values.planned_faults import FaultPlan
from tests.catalogue import reference
from tests.catalogue.case import Case, Settings
from tests.catalogue.test_catalogue import compare

ROOT = Path(mh.__file__).parent.parent


class Net(pl.LightningModule):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(6, width), nn.BatchNorm1d(width), nn.Dropout(0.2), nn.Linear(width, 3)
        )
        self.accuracy = MulticlassAccuracy(3, average="micro")
        self.f1 = MetricCollection({"f1": MulticlassF1Score(3), "acc": MulticlassAccuracy(3)})

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.shared(batch, batch_idx), "more": batch_idx}

    def shared(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss, on_step=True)
        self.accuracy(self.net(batch[0]), batch[1])
        self.log("train_acc", self.accuracy)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        scores = self.net(batch[0])
        self.accuracy.update(scores, batch[1])
        self.f1.update(scores, batch[1])
        self.log_dict({"val_loss": F.cross_entropy(scores, batch[1]), "val_acc": self.accuracy})
        self.log_dict(self.f1)
        self.log("largest", scores.max(), reduce_fx="max")

    def predict_step(self, batch: Any) -> Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def rows(count: int, seed: int) -> TensorDataset:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=g)
    return TensorDataset(x, x[:, :3].argmax(1))


TRAIN, VAL = rows(29, 1), rows(10, 2)


def loaders(batch: int = 12) -> tuple[DataLoader, DataLoader]:
    return DataLoader(TRAIN, batch, shuffle=True), DataLoader(VAL, 4)


def ported(module: Any = Net, data: Any = None, **given: Any) -> Any:
    epochs = {} if "max_steps" in given else {"max_epochs": 1}
    return mh.from_lightning(module, data or loaders(), **{**epochs, **given})


def visits(seed: int) -> Callable[[int], list[int]]:
    return lambda epoch: order(seed, epoch, len(TRAIN))[range(len(TRAIN))].tolist()


def plain(module: Any = Net, clip: float | None = None, **more: Any) -> dict[str, Tensor]:
    """The same by a loop of PyTorch that knows the module's network alone."""

    def loss(model: Any, batch: Any) -> Tensor:
        value = F.cross_entropy(model.net(batch[0]), batch[1])
        with torch.random.fork_rng():
            model.net(batch[0])  # for the accuracy: BatchNorm sees the batch twice
        return value

    case = Case(
        "lightning",
        "",
        model=module,
        loss=loss,
        optimizer=more.pop("optimizer", lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2)),
        data=TRAIN,
        settings=Settings(seed=0, micro_batch=4, clip_norm=clip),
        **more,
    )
    return reference.train(case, visits(0))


KILLS = FaultPlan().kill(rank=1, at_step=2, at="gather").kill(rank=0, at_step=4, at="update")


@pytest.mark.parametrize(("workers", "faults"), [(1, FaultPlan()), (2, FaultPlan()), (3, KILLS)])
def test_it_has_the_bits_of_plain_pytorch(
    workers: int, faults: FaultPlan, launcher: Launcher, tmp_path: Path
) -> None:
    ready = ported(max_epochs=2, gradient_clip_val=0.5)
    found = mh.train(
        ready,
        to=tmp_path / "run",
        workers=workers,
        settings=["train.micro_batch=4"],
        quiet=True,
        launcher=launcher,
        faults=faults,
    )
    compare(load_file(found.weights), plain(clip=0.5))
    net = Net()
    net.load_state_dict(load_file(found.weights), strict=False)
    net.eval()
    with torch.no_grad():
        said = net.net(VAL.tensors[0])
    right = (said.argmax(1) == VAL.tensors[1]).float().mean().item()
    assert found.scores["val_acc"] == pytest.approx(right)
    assert found.scores["val_loss"] == pytest.approx(F.cross_entropy(said, VAL.tensors[1]).item())
    assert found.scores["largest"] == pytest.approx(said.max().item())
    assert found.scores["f1"] == pytest.approx(MulticlassF1Score(3)(said, VAL.tensors[1]).item())
    assert {"loss", "acc"} <= found.scores.keys()
    if workers == 3:
        again = replay(found.run, ready.task, step=3, to=6, workers=2, launcher=launcher)
        assert again.same


class Plateau(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=9.0)
        return {"optimizer": optimizer, "lr_scheduler": schedule, "monitor": "val_loss"}


class Listed(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


class PerStep(Net):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        total = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def sgd(model: nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("module", "every", "schedule"),
    [
        (Listed, "epoch", lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5)),
        (PerStep, "step", lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, 6)),
    ],
)
def test_schedules_are_stepped_when_lightning_would(
    module: Any, every: str, schedule: Any, launcher: Launcher, tmp_path: Path
) -> None:
    found = mh.train(
        ported(module, max_epochs=2),
        to=tmp_path / "run",
        workers=2,
        settings=["train.micro_batch=4"],
        quiet=True,
        launcher=launcher,
    )
    expected = plain(module, optimizer=sgd, schedule=schedule, schedule_every=every)
    compare(load_file(found.weights), expected)


def test_a_plateau_hears_the_score_that_it_monitors(launcher: Launcher, tmp_path: Path) -> None:
    ready = ported(Plateau, max_epochs=3)
    assert ready.config["evaluate"]["by"] == "val_loss:min"
    mh.train(ready, to=tmp_path / "run", workers=2, quiet=True, launcher=launcher)
    journal = (tmp_path / "run" / "ledger.jsonl").read_text()
    assert journal.count("heard_score") == 3
    said = (tmp_path / "run" / "events.jsonl").read_text()
    assert "not the batch's 12; --set train.micro_batch=12 keeps that" in said


def test_accumulated_batches_are_micro_batches(launcher: Launcher, tmp_path: Path) -> None:
    ready = ported(Listed, loaders(4), accumulate_grad_batches=3, max_epochs=2)
    assert ready.config["train"] == {"batch": 12, "micro_batch": 4, "epochs": 2}
    found = mh.train(ready, to=tmp_path / "run", workers=3, quiet=True, launcher=launcher)
    schedule = lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5)  # noqa: E731
    expected = plain(Listed, optimizer=sgd, schedule=schedule, schedule_every="epoch")
    compare(load_file(found.weights), expected)


def test_a_module_brings_its_weights_and_a_class_takes_them_from_the_seed() -> None:
    module = Net()
    for _ in range(2):
        built = ported(module).task.model()
        assert torch.equal(built.net[0].weight, module.net[0].weight)
        assert built is not module
    assert not isinstance(ported().task.model, nn.Module)


class Data(pl.LightningDataModule):
    def prepare_data(self) -> None:
        self.asked = ["prepare_data"]

    def setup(self, stage: str) -> None:
        self.asked += [stage]

    def train_dataloader(self) -> Any:
        return DataLoader(TRAIN, 6, shuffle=True, collate_fn=together)

    def val_dataloader(self) -> Any:
        return [DataLoader(VAL, 5, collate_fn=together)]


def together(records: list[Any]) -> list[Tensor]:
    return [torch.stack([r[0] for r in records]), torch.stack([r[1] for r in records])]


def test_a_data_module_is_prepared_set_up_and_asked() -> None:
    data = Data()
    ready = ported(data=data, max_steps=7)
    assert data.asked == ["prepare_data", "fit"]
    assert ready.task.data.collate_fn is together
    assert ready.config == {"train": {"batch": 6, "steps": 7}, "evaluate": {"batch": 5}}


def test_arguments_of_the_trainer_are_settings() -> None:
    callbacks = [
        EarlyStopping("val_acc", mode="max", patience=2),
        ModelCheckpoint(monitor="val_loss", every_n_epochs=2),
        LearningRateMonitor(),
    ]
    ready = ported(
        max_epochs=5,
        gradient_clip_val=1,
        precision="bf16-mixed",
        log_every_n_steps=3,
        check_val_every_n_epoch=2,
        callbacks=callbacks,
        accelerator="cpu",
        devices=1,
        enable_progress_bar=False,
    )
    assert ready.config == {
        "train": {"batch": 12, "epochs": 5, "clip_norm": 1.0, "precision": "bf16"},
        "evaluate": {"batch": 4, "every_steps": 6, "by": "val_acc:max", "stop_early": 2},
        "checkpoint": {"keep_best": "val_loss:min", "every_steps": 6},
        "log": {"every_steps": 3},
    }
    from_dict(ready.config)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"devices": 4}, "devices cannot be honoured.*--workers"),
        ({"strategy": "ddp"}, "strategy cannot be honoured"),
        ({"precision": "64-true"}, "precision='64-true'"),
        ({"gradient_clip_algorithm": "value"}, "clipped by their norm"),
        ({"callbacks": [StochasticWeightAveraging(0.1)]}, "StochasticWeightAveraging.*train.swa"),
        ({"callbacks": [EarlyStopping("train_loss")]}, "'train_loss' is monitored.*val_acc"),
        ({"callbacks": EarlyStopping("val_loss", min_delta=0.1)}, "min_delta"),
        ({"callbacks": ModelCheckpoint(monitor="val_loss", save_top_k=3)}, "save_top_k=3"),
        ({"profiler": "simple"}, "profiler cannot be honoured"),
        ({"max_epochs": 3, "max_steps": 5}, "give one of them"),
        ({"max_epochs": -1}, "a run has an end"),
        ({"max_epoch": 2}, "Did you mean max_epochs"),
        ({"callbacks": [type("Own", (EarlyStopping,), {})("val_loss")]}, "the callback Own"),
    ],
)
def test_arguments_that_cannot_be_honoured_are_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(TaskError, match=said):
        ported(**given)


def test_one_epoch_where_lightning_would_train_a_thousand_is_pointed_out() -> None:
    with pytest.warns(UserWarning, match="max_epochs was not given: one epoch") as seen:
        mh.from_lightning(Net, loaders())
    assert [Path(each.filename) for each in seen] == [Path(__file__)]


HOOKS = [
    "optimizer_step",
    "optimizer_zero_grad",
    "backward",
    "configure_gradient_clipping",
    "on_before_optimizer_step",
    "on_after_backward",
    "on_before_zero_grad",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_train_epoch_end",
    "on_validation_epoch_end",
    "on_save_checkpoint",
    "on_load_checkpoint",
    "configure_model",
    "lr_scheduler_step",
    "configure_callbacks",
    "on_train_start",
]


@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_that_cannot_be_honoured_are_named(hook: str) -> None:
    kind = type("Hooked", (Net,), {hook: lambda self, *_, **__: None})
    with pytest.raises(TaskError, match=rf"Hooked\.{hook} cannot be honoured: "):
        ported(kind)


def manual(self: Any) -> None:
    Net.__init__(self)
    self.automatic_optimization = False


def two(self: Any) -> Any:
    return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)]


@pytest.mark.parametrize(
    ("has", "said"),
    [
        ({"__init__": manual}, r"automatic_optimization = False.*mh\.Task\(optimizer=\{'d'"),
        ({"configure_optimizers": two}, r"gives 2 optimizers.*optimizer=\{'d'"),
        ({"validation_step": lambda self, b, batch_idx: batch_idx % 2}, "uses batch_idx"),
        ({"validation_step": lambda self, b: self.global_step}, "self.trainer.global_step"),
        ({"validation_step": lambda self, b: self.current_epoch}, "self.trainer.current_epoch"),
        ({"validation_step": lambda self, b: self.optimizers()}, "self.trainer.strategy"),
        ({"validation_step": lambda self, b: self.log("x", 1.0, reduce_fx=len)}, "reduce_fx=len"),
        ({"val_dataloader": lambda self: [1, 2]}, "val_dataloader gives list"),
    ],
)
def test_modules_that_cannot_be_honoured_are_told_why(has: dict[str, Any], said: str) -> None:
    kind = type("Odd", (Net,), {"train_dataloader": lambda self: loaders()[0], **has})
    own = "val_dataloader" in has
    with pytest.raises(TaskError, match=re.compile(said, re.DOTALL)):
        mh.from_lightning(kind, None if own else loaders(), max_epochs=1)


def test_what_is_no_module_of_lightning_is_told() -> None:
    with pytest.raises(TaskError, match="Linear is no LightningModule"):
        mh.from_lightning(nn.Linear(2, 2), loaders())


def test_nobody_but_the_user_imports_lightning() -> None:
    code = (
        "import sys, manyhands.adapters.from_lightning, manyhands.worker.lifecycle\n"
        "sys.exit('lightning' in sys.modules or 'pytorch_lightning' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_example_stops_early_keeps_the_best_and_is_the_same_on_any_number(
    launcher: Launcher, tmp_path: Path
) -> None:
    path = ROOT / "examples" / "20_lightning.py"
    assert len(path.read_text().splitlines()) < 80
    config = load_task(path).config
    assert config is not None and config.evaluate is not None
    assert (config.evaluate.by, config.evaluate.stop_early) == ("val_loss:min", 3)
    assert config.checkpoint.keep_best == "val_acc:max"
    prints = set()
    plans = {1: FaultPlan(), 3: FaultPlan().kill(rank=1, at_step=5, at="update")}
    for workers, faults in plans.items():
        found = mh.train(
            path,
            to=tmp_path / str(workers),
            workers=workers,
            settings=["train.epochs=2"],
            quiet=True,
            launcher=launcher,
            faults=faults,
        )
        assert found.scores["val_acc"] > 0.5
        prints.add((found.fingerprint, *found.scores.values()))
    assert len(prints) == 1
