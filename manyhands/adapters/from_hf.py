# SPDX-License-Identifier: Apache-2.0
"""A model of Hugging Face, as its Trainer would train it, as a task. transformers is imported when
this is used: in the driver where the task is made, and in workers."""

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import Module
from torch.optim import Optimizer

from manyhands.adapters.hf_arguments import (
    hf_settings,
    read_arguments,
    take_callbacks,
    total_steps,
)
from manyhands.adapters.hf_collate import collate_of
from manyhands.adapters.hf_loss import HfLoss, counting, smoothing
from manyhands.adapters.hf_metrics import HfMetrics, predictions_in
from manyhands.adapters.hf_names import by_our_names
from manyhands.adapters.hf_sampling import kept_held_out, kept_records, sampler_of
from manyhands.values.errors import TaskError
from manyhands.values.ported_task import PortedTask
from manyhands.values.task import Task


def from_hf(
    model: Any,
    dataset: Any = None,
    collator: Callable[[list[Any]], Any] | None = None,
    arguments: Any = None,
    *,
    eval_dataset: Any = None,
    compute_metrics: Callable[[Any], Mapping[str, float]] | None = None,
    processing_class: Any = None,
    preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None = None,
    callbacks: Sequence[Any] | None = None,
    **trainer: Any,
) -> PortedTask:
    """A task, and its config, of what Trainer is given.

    `model` is a module with its weights, or a function that builds one. `arguments` are
    TrainingArguments, or a dict of them. What compute_metrics gives are scores: eval/NAME.
    Trainer's own names will do: args, data_collator, train_dataset, tokenizer. What cannot be
    honoured is refused by name. See docs/coming_from.md.
    """
    known = _training_arguments()
    named = {"dataset": dataset, "collator": collator, "arguments": arguments}
    named["processing_class"] = processing_class
    named = by_our_names(named, trainer, known)
    dataset, collator, arguments, processing_class = named.values()
    _refuse_streams(dataset, eval_dataset)
    read = read_arguments({} if arguments is None else arguments, known)
    records = kept_records(read, len(dataset))
    config = hf_settings(read, records, scored=eval_dataset is not None)
    take_callbacks(callbacks or (), read, config)
    with torch.random.fork_rng(devices=[]):
        probe: Any = model if isinstance(model, Module) else model()
    takes = inspect.signature(probe.forward).parameters
    columns = frozenset([*takes, "label", "label_ids"]) if read.remove_unused_columns else None
    made = HfTask(
        HfModel(model, read, processing_class),
        HfLoss(smoothing(read, probe), *counting(probe, takes)),
        read,
        total_steps(read, records),
        compute_metrics is not None,
        preprocess_logits_for_metrics,
    )
    metrics = {"eval": HfMetrics(compute_metrics)} if compute_metrics is not None else {}
    task = Task(
        model=made.model,
        loss=made.loss,
        optimizer=made.optimizer,
        schedule=made.schedule,
        data=dataset,
        held_out=kept_held_out(read, eval_dataset),
        collate=collate_of(collator, processing_class, columns),
        sampler=sampler_of(read, dataset, processing_class),
        predict=made.predict,
        scores=metrics if eval_dataset is not None else {},
    )
    return PortedTask(task, config)


def _training_arguments() -> Any:
    try:
        from transformers import TrainingArguments
    except ImportError as error:
        raise TaskError(
            f"from_hf needs transformers ({error}): pip install manyhands[hf]"
        ) from error
    return TrainingArguments


def _refuse_streams(dataset: Any, eval_dataset: Any) -> None:
    for what, given in (("data set", dataset), ("eval_dataset", eval_dataset)):
        if given is not None and (isinstance(given, Mapping) or not hasattr(given, "__len__")):
            raise TaskError(
                f"from_hf: the {what} is {type(given).__name__}; give one data set with a length. "
                "(Streams are for mh.Task(data=...): docs/data.md.)"
            )


@dataclass(frozen=True)
class HfModel:
    """The model as Trainer prepares it."""

    given: Any
    arguments: SimpleNamespace
    tokenizer: Any

    def __call__(self) -> Module:
        given, read = self.given, self.arguments
        model: Any = copy.deepcopy(given) if isinstance(given, Module) else given()
        if read.gradient_checkpointing:
            options = dict(read.gradient_checkpointing_kwargs or {})
            apart = {n: options.pop(n) for n in ("every_n_layers", "offload") if n in options}
            model.gradient_checkpointing_enable(options or None, **apart)
        if self.tokenizer is not None and hasattr(model, "config"):
            _align(model, self.tokenizer)
        if read.neftune_noise_alpha is not None:
            from transformers.integrations.neftune import activate_neftune

            activate_neftune(model, read.neftune_noise_alpha)
        return model


def _align(model: Any, tokenizer: Any) -> None:
    """The model's config with the special tokens of its tokenizer."""
    from transformers import PreTrainedTokenizerBase, ProcessorMixin
    from transformers.trainer_utils import align_special_tokens

    if isinstance(tokenizer, PreTrainedTokenizerBase | ProcessorMixin):
        align_special_tokens(model, tokenizer)


@dataclass(frozen=True)
class HfTask:
    model: HfModel
    loss: HfLoss
    arguments: SimpleNamespace
    steps: int
    measured: bool
    """There is a compute_metrics."""
    preprocess: Callable[[Any, Any], Any] | None

    def predict(self, model: Module, batch: dict[str, Any]) -> tuple[Any, Any]:
        outputs: Any = model(**batch)
        labels = batch.get("labels")
        if self.measured or not isinstance(outputs, Mapping) or "logits" not in outputs:
            said = predictions_in(outputs, model)
        else:
            said = outputs["logits"]
        if self.preprocess is not None and labels is not None:
            said = self.preprocess(said, labels)
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
