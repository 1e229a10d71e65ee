# SPDX-License-Identifier: Apache-2.0
"""A LightningModule as a task. Lightning itself is imported by the user's own program, and so in
workers alone; nothing of its Trainer is used."""

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, IterableDataset

from manyhands.adapters.first_records import whole_batches
from manyhands.adapters.lightning_hooks import (
    OF_DATA,
    lightning_base,
    overrides,
    refuse_hooks,
    refuse_module,
)
from manyhands.adapters.lightning_log import LoggedScore, logging, note, noted, scores_of
from manyhands.adapters.lightning_optimizers import Configured, configured
from manyhands.adapters.trainer_arguments import LoaderSizes, settings_of
from manyhands.adapters.trainer_stand_in import NoIndex, TrainerStandIn, stand_in_facts
from manyhands.values.errors import TaskError
from manyhands.values.ported_task import PortedTask
from manyhands.values.task import Task


def from_lightning(module: Any, datamodule: Any = None, **trainer: Any) -> PortedTask:
    """A task, and its config, of a LightningModule; `trainer` are arguments of Lightning's Trainer.

    `module` is a LightningModule, with its weights as they are, or (so that the first weights
    follow from train.seed) a class or function that builds one. Data comes from `datamodule` (or a
    pair of DataLoaders: train, or train and val), or else from the module's own loaders. What
    cannot be honoured is refused by name. See docs/coming_from.md.
    """
    with torch.random.fork_rng(devices=[]):
        probe = copy.deepcopy(module) if isinstance(module, Module) else module()
        if lightning_base(probe, "LightningModule") is None:
            missing = find_spec("lightning") is None and find_spec("pytorch_lightning") is None
            cure = " Lightning is not installed: pip install manyhands[lightning]" * missing
            raise TaskError(
                f"from_lightning: {type(probe).__name__} is no LightningModule; give one, or a "
                f"function that builds it.{cure}"
            )
        refuse_module(probe)
        train, held_out = _loaders(probe, datamodule)
        if trainer.get("accumulate_grad_batches", 1) not in (None, 1):
            train = whole_batches(train)
        if not overrides(probe, "LightningModule", "validation_step"):
            held_out = None
        scored_batch = None if held_out is None else held_out.batch_size
        sizes = LoaderSizes(len(train.sampler), train.batch_size, train.drop_last, scored_batch)
        config = settings_of(trainer, sizes)
        made = LightningTask(module, _facts(config, sizes))
        probe = made.attached(probe)
        optimizers = configured(probe)
        scores = {} if held_out is None else _scores(probe, held_out)
    _see_that_monitors_agree(config, optimizers, scores)
    return PortedTask(made.task(train, held_out, optimizers, scores), config)


@dataclass
class LightningTask:
    """The functions of a task, each of which calls the module's own."""

    given: Any
    facts: dict[str, Any]
    made: "tuple[Optimizer, Any] | None" = field(default=None, repr=False)
    """The optimizer that was built last, and the scheduler that was built with it."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "made": None}

    def task(
        self,
        train: Any,
        held_out: Any,
        optimizers: Configured,
        scores: dict[str, LoggedScore],
    ) -> Task:
        return Task(
            model=self.model,
            loss=self.loss,
            optimizer=self.optimizer,
            schedule=None if optimizers.scheduler is None else self.schedule,
            schedule_every=optimizers.every,
            data=train,
            held_out=held_out,
            predict=self.predict,
            scores=scores,
        )

    def attached(self, module: Any) -> Any:
        """With the stand-in for its Trainer."""
        module.trainer = TrainerStandIn(self.facts)
        module.setup("fit")
        return module

    def model(self) -> Module:
        given = self.given
        return self.attached(copy.deepcopy(given) if isinstance(given, Module) else given())

    def optimizer(self, module: Any) -> Optimizer:
        found = configured(module)
        self.made = found.optimizer, found.scheduler
        return found.optimizer

    def schedule(self, optimizer: Optimizer) -> Any:
        assert self.made is not None and self.made[0] is optimizer
        return self.made[1]

    def loss(self, module: Any, batch: Any) -> Any:
        if not module.training:
            return self.held_out_loss(module, batch)
        with logging(module, batch) as record:
            loss = _loss_in(called(module.training_step, module, batch))
            if loss is None:
                raise TaskError(
                    f"{type(module).__name__}.training_step returned no loss. Lightning would skip "
                    "the batch; here every record counts. Return a tensor, or a dict with 'loss'."
                )
        numbers = record.numbers()
        return (loss, numbers) if numbers else loss

    def held_out_loss(self, module: Any, batch: Any) -> Tensor:
        """Of validation_step: what it returns or logs as the loss; or else training_step's."""
        if overrides(module, "LightningModule", "validation_step"):
            with logging(module, batch) as record:
                loss = _loss_in(called(module.validation_step, module, batch))
            note(module, record)
            loss = record.values.get("loss", loss)
            if isinstance(loss, Tensor):
                return loss
        with logging(module, batch):
            return _loss_in(called(module.training_step, module, batch))

    def predict(self, module: Any, batch: Any) -> Any:
        """What predict_step says. (While scoring nothing: scores find what was logged.)"""
        if noted(module, batch):
            return torch.zeros(1), torch.zeros(1)
        if not overrides(module, "LightningModule", "predict_step"):
            raise TaskError(
                f"{type(module).__name__} has no predict_step, so there is nothing to predict."
            )
        return called(module.predict_step, module, batch)


def called(step: Callable[..., Any], module: Any, batch: Any) -> Any:
    """A step of the module, given what it takes."""
    takes = inspect.signature(step).parameters
    who = f"{type(module).__name__}.{step.__name__}"
    if "dataloader_iter" in takes:
        raise TaskError(f"{who} takes dataloader_iter: write it for a batch.")
    batch = module.on_after_batch_transfer(module.on_before_batch_transfer(batch, 0), 0)
    index: dict[str, Any] = {"batch_idx": NoIndex(who), "dataloader_idx": 0}
    more = {name: value for name, value in index.items() if name in takes}
    return step(batch, **more)


def _loss_in(returned: Any) -> Any:
    return returned.get("loss") if isinstance(returned, dict) else returned


def _facts(config: dict[str, Any], sizes: LoaderSizes) -> dict[str, Any]:
    train = config["train"]
    per_epoch = sizes.per_epoch(train["batch"])
    return stand_in_facts(
        config, train.get("steps") or train.get("epochs", 1) * per_epoch, per_epoch
    )


def _loaders(module: Any, datamodule: Any) -> tuple[Any, Any]:
    """DataLoaders to train on and to score with; the latter may be None."""
    if isinstance(datamodule, DataLoader):
        return _one(datamodule, "train"), None
    if isinstance(datamodule, list | tuple):
        pair: list[Any] = list(datamodule)
        return _one(pair[0], "train"), _one(pair[1], "val") if len(pair) > 1 else None
    source, kind = (module, "LightningModule")
    if datamodule is not None:
        source, kind = datamodule, "LightningDataModule"
        if lightning_base(source, kind) is None:
            raise TaskError(
                f"from_lightning: datamodule is {type(source).__name__}; give a "
                "LightningDataModule, or DataLoaders: (train, val)."
            )
        refuse_hooks(source, kind, OF_DATA)
    if source is not module or overrides(module, kind, "prepare_data"):
        source.prepare_data()
    source.setup("fit")
    if not overrides(source, kind, "train_dataloader"):
        raise TaskError(
            f"from_lightning: {type(source).__name__} has no train_dataloader; give a "
            "LightningDataModule, or DataLoaders: (train, val)."
        )
    held_out = source.val_dataloader() if overrides(source, kind, "val_dataloader") else None
    return _one(source.train_dataloader(), "train"), _one(held_out, "val")


def _one(loader: Any, which: str) -> Any:
    if isinstance(loader, list | tuple) and len(loader) == 1:
        loader = loader[0]
    if loader is None or (isinstance(loader, list | tuple) and not loader):
        return None
    if not isinstance(loader, DataLoader):
        raise TaskError(
            f"from_lightning: {which}_dataloader gives {type(loader).__name__}; one DataLoader is "
            "understood. Several data sets to train on: torch.utils.data.ConcatDataset; to score: "
            "manyhands evaluate RUN --data."
        )
    if loader.batch_size is None or isinstance(loader.dataset, IterableDataset):
        raise TaskError(
            f"from_lightning: {which}_dataloader must have a batch_size, and a data set whose "
            "records have numbers. Streams are for mh.Task(data=...): docs/data.md."
        )
    return loader


def _scores(probe: Any, held_out: Any) -> dict[str, LoggedScore]:
    """What validation_step logs, found by running it on the first two records."""
    data, was = held_out.dataset, probe.training
    batch = held_out.collate_fn([data[k] for k in range(min(2, len(data)))])
    probe.eval()
    with torch.no_grad(), logging(probe, batch) as record:
        called(probe.validation_step, probe, batch)
    probe.train(was)
    return scores_of(record)


def _see_that_monitors_agree(
    config: dict[str, Any], optimizers: Configured, scores: dict[str, LoggedScore]
) -> None:
    evaluate, checkpoint = config.get("evaluate", {}), config.get("checkpoint", {})
    on_score = isinstance(optimizers.scheduler, ReduceLROnPlateau)
    if on_score:
        by = str(evaluate.get("by", optimizers.monitor)).partition(":")[0]
        if by != optimizers.monitor:
            raise TaskError(
                f"from_lightning: ReduceLROnPlateau hears '{optimizers.monitor}', and "
                f"EarlyStopping '{by}'; one score decides both (evaluate.by)."
            )
        evaluate.setdefault("by", f"{optimizers.monitor}:{optimizers.scheduler.mode}")
        if "evaluate" not in config:
            raise TaskError("from_lightning: ReduceLROnPlateau needs a val_dataloader.")
    for who, text in (
        ("evaluate.by", evaluate.get("by")),
        ("ModelCheckpoint", checkpoint.get("keep_best")),
    ):
        name = str(text).partition(":")[0]
        if text is not None and name != "loss" and name not in scores:
            raise TaskError(
                f"from_lightning: '{name}' is monitored ({who}), and validation_step logs: "
                f"{', '.join(scores) or 'nothing'}. Log it there."
            )
