# SPDX-License-Identifier: Apache-2.0
"""A model of Hugging Face, as its Trainer would train it, as a task. transformers is imported when
this is used: in the driver where the task is made, and in workers."""

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from manyhands.adapters.hf_arguments import hf_settings, read_arguments, total_steps
from manyhands.values.errors import TaskError
from manyhands.values.ported_task import PortedTask
from manyhands.values.task import Task


def from_hf(
    model: Any,
    dataset: Any,
    collator: Callable[[list[Any]], Any] | None = None,
    arguments: Any = None,
    *,
    eval_dataset: Any = None,
    compute_metrics: Callable[[Any], Mapping[str, float]] | None = None,
) -> PortedTask:
    """A task, and its config, of what Trainer is given.

    `model` is a module with its weights, or a function that builds one. `arguments` are
    TrainingArguments, or a dict of them. What compute_metrics gives are scores: eval/NAME. What
    cannot be honoured is refused by name. See docs/coming_from.md.
    """
    try:
        from transformers import TrainingArguments, default_data_collator
    except ImportError as error:
        raise TaskError(
            f"from_hf needs transformers ({error}): pip install manyhands[hf]"
        ) from error
    if not hasattr(dataset, "__len__"):
        raise TaskError(
            "from_hf: the data set has no length. Streams are for mh.Task(data=...): docs/data.md."
        )
    read = read_arguments({} if arguments is None else arguments, TrainingArguments)
    config = hf_settings(read, len(dataset), scored=eval_dataset is not None)
    with torch.random.fork_rng(devices=[]):
        probe: Any = model if isinstance(model, Module) else model()
    takes = inspect.signature(probe.forward).parameters
    columns = frozenset([*takes, "label", "label_ids"]) if read.remove_unused_columns else None
    made = HfTask(model, read, total_steps(read, len(dataset)), *_counting(probe, takes))
    metrics = {"eval": HfMetrics(compute_metrics)} if compute_metrics is not None else {}
    task = Task(
        model=made.model,
        loss=made.loss,
        optimizer=made.optimizer,
        schedule=made.schedule,
        data=dataset,
        held_out=eval_dataset,
        collate=HfCollate(collator or default_data_collator, columns),
        predict=made.predict,
        scores=metrics if eval_dataset is not None else {},
    )
    return PortedTask(task, config)


@dataclass(frozen=True)
class HfCollate:
    """Their collator, given what the model's forward takes (remove_unused_columns)."""

    collator: Callable[[list[Any]], Any]
    columns: frozenset[str] | None

    def __call__(self, records: list[Any]) -> Any:
        keep = self.columns
        if keep is not None and isinstance(records[0], Mapping):
            records = [{k: v for k, v in r.items() if k in keep} for r in records]
        return dict(self.collator(records))


@dataclass(frozen=True)
class HfMetrics:
    compute: Callable[[Any], Mapping[str, float]]

    def __call__(self, predictions: Tensor, targets: Tensor) -> dict[str, float]:
        from transformers import EvalPrediction

        found = self.compute(EvalPrediction(predictions.numpy(), targets.numpy()))
        return {name.removeprefix("eval_"): float(value) for name, value in found.items()}


def _counting(model: Any, takes: Mapping[str, inspect.Parameter]) -> tuple[bool, bool]:
    """Whether the loss is a mean over labels (as Trainer finds it out), and over shifted ones."""
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    some = any(p.kind == inspect.Parameter.VAR_KEYWORD for p in takes.values())
    by_items = bool(getattr(model, "accepts_loss_kwargs", some))
    encodes = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    kind = LOSS_MAPPING.get(str(getattr(model, "loss_type", "")))
    return by_items, kind is ForCausalLMLoss and not encodes


@dataclass(frozen=True)
class HfTask:
    given: Any
    arguments: SimpleNamespace
    steps: int
    by_items: bool
    shifted: bool

    def model(self) -> Module:
        return copy.deepcopy(self.given) if isinstance(self.given, Module) else self.given()

    def loss(self, model: Module, batch: dict[str, Any]) -> Any:
        outputs = model(**batch)
        if isinstance(outputs, Mapping) and "loss" not in outputs:
            raise TaskError(
                f"{type(model).__name__} returned no loss, only {', '.join(outputs)}; it was given "
                f"{', '.join(batch)}. Are there labels?"
            )
        loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs[0]
        labels = batch.get("labels")
        if not self.by_items or not isinstance(labels, Tensor):
            return loss
        counted = labels[..., 1:] if self.shifted else labels
        return loss, counted.ne(-100).sum()

    def predict(self, model: Module, batch: dict[str, Any]) -> tuple[Any, Any]:
        outputs = model(**batch)
        labels = batch.get("labels")
        said = outputs["logits"] if isinstance(outputs, Mapping) else outputs[-1]
        return said, torch.zeros(len(said)) if labels is None else labels

    def optimizer(self, model: Module) -> Optimizer:
        """Trainer's: weights that decay, and those that do not (biases, norms)."""
        from transformers import Trainer

        read: Any = self.arguments
        decays = set(Trainer.get_decay_parameter_names(None, model))  # pyright: ignore[reportArgumentType]
        kind, options = Trainer.get_optimizer_cls_and_kwargs(read, None)
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        groups = [
            {"params": [p for n, p in named if n in decays], "weight_decay": read.weight_decay},
            {"params": [p for n, p in named if n not in decays], "weight_decay": 0.0},
        ]
        return kind(groups, **options)

    def schedule(self, optimizer: Optimizer) -> Any:
        from transformers import TrainingArguments, get_scheduler

        read: Any = self.arguments
        return get_scheduler(
            read.lr_scheduler_type,
            optimizer,
            num_warmup_steps=TrainingArguments.get_warmup_steps(read, self.steps),
            num_training_steps=self.steps,
            scheduler_specific_kwargs=read.lr_scheduler_kwargs,
        )
