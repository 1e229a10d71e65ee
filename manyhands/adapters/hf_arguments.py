# SPDX-License-Identifier: Apache-2.0
"""TrainingArguments of Hugging Face → settings; what cannot be one is refused by name."""

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from difflib import get_close_matches
from types import SimpleNamespace
from typing import Any

from manyhands.accounting.deal_micro_batches import steps_per_epoch
from manyhands.values.errors import TaskError

OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd", "adafactor", "adagrad", "rmsprop")

REFUSED = {
    "deepspeed": "workers hold whole models.",
    "fsdp": "workers hold whole models.",
    "torch_compile_mode": "train.compile compiles in torch.compile's default mode.",
    "use_liger_kernel": "kernels must give the same bits everywhere.",
    "data_seed": "one seed is for all.",
    "fp16_full_eval": "scores are computed as training is.",
    "bf16_full_eval": "scores are computed as training is.",
    "resume_from_checkpoint": "manyhands resume RUN.",
    "eval_delay": "held-out records are scored from the first time on.",
    "eval_on_start": "held-out records are scored after steps.",
    "optim_target_modules": "every weight is trained in the same way.",
    "include_for_metrics": "compute_metrics is given predictions and labels.",
    "batch_eval_metrics": "compute_metrics is given all predictions at once.",
}

HONOURED = [
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "gradient_accumulation_steps",
    "num_train_epochs",
    "max_steps",
    "seed",
    "max_grad_norm",
    "bf16",
    "fp16",
    "label_smoothing_factor",
    "neftune_noise_alpha",
    "gradient_checkpointing",
    "gradient_checkpointing_kwargs",
    "torch_compile",
    "torch_compile_backend",
    "train_sampling_strategy",
    "group_by_length",
    "length_column_name",
    "dataloader_drop_last",
    "optim",
    "optim_args",
    "learning_rate",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "lr_scheduler_type",
    "lr_scheduler_kwargs",
    "warmup_steps",
    "warmup_ratio",
    "logging_strategy",
    "logging_steps",
    "save_strategy",
    "save_steps",
    "save_total_limit",
    "eval_strategy",
    "eval_steps",
    "load_best_model_at_end",
    "metric_for_best_model",
    "greater_is_better",
    "dataloader_num_workers",
    "remove_unused_columns",
    "do_train",
    "do_eval",
    "do_predict",
]

HARMLESS = (
    *(
        "output_dir",
        "overwrite_output_dir",
        "run_name",
        "report_to",
        "project",
        "disable_tqdm",
        "log_",
    ),
    *(
        "logging_",
        "save_",
        "hub_",
        "push_to_hub",
        "trackio",
        "use_cpu",
        "no_cuda",
        "local_rank",
        "ddp_",
    ),
    *(
        "dataloader_pin",
        "dataloader_prefetch",
        "dataloader_persistent",
        "include_",
        "restore_callback",
    ),
    *(
        "accelerator_config",
        "parallelism_config",
        "tf32",
        "debug",
        "prediction_loss_only",
        "eval_acc",
    ),
    *(
        "skip_memory_metrics",
        "torch_empty_cache",
        "average_tokens",
        "past_index",
        "ignore_data_skip",
    ),
)
"""How they begin: where things are written and shown, and on what hardware."""

ONLY_SHOW = {"PrinterCallback", "ProgressCallback", "NotebookProgressCallback"}
"""Callbacks: the run shows these things itself."""


def read_arguments(given: Any, kind: type) -> SimpleNamespace:
    """All arguments as attributes: of a TrainingArguments, or of a dict with the same names."""
    defaults = {
        f.name: f.default_factory() if f.default_factory is not MISSING else f.default
        for f in fields(kind)
    }
    if isinstance(given, Mapping):
        for name in given:
            if name not in defaults:
                near = get_close_matches(str(name), defaults, 1)
                hint = f"; did you mean {near[0]}?" if near else "."
                raise TaskError(f"from_hf: TrainingArguments has no '{name}'{hint}")
        values = {**defaults, **given}
    else:
        values = {name: getattr(given, name, default) for name, default in defaults.items()}
    for name, why in REFUSED.items():
        value, usual = _plain(values.get(name)), _plain(defaults.get(name))
        if value != usual and value not in (None, False, 0, "", []):
            raise TaskError(f"from_hf: {name} = {value!r} cannot be honoured: {why}")
    for name, value in values.items():
        known = name in HONOURED or name in REFUSED or name.startswith(HARMLESS)
        if not known and _plain(value) not in (_plain(defaults[name]), None, False):
            warnings.warn(f"from_hf: {name} = {_plain(value)!r} has no effect here.", stacklevel=4)
    read = SimpleNamespace(**{name: _plain(value) for name, value in values.items()})
    _see_that_it_can_be_done(read)
    return _completed(read)


def _see_that_it_can_be_done(read: SimpleNamespace) -> None:
    if read.optim not in OPTIMIZERS:
        raise TaskError(
            f"from_hf: optim = {read.optim!r} cannot be honoured; known are: "
            f"{', '.join(OPTIMIZERS)}."
        )
    if read.lr_scheduler_type == "greedy":
        raise TaskError(
            "from_hf: lr_scheduler_type = 'greedy' cannot be honoured: of schedules that hear "
            "scores, reduce_lr_on_plateau can be."
        )
    if read.lr_scheduler_type == "reduce_lr_on_plateau" and read.eval_strategy == "no":
        raise TaskError(
            "from_hf: lr_scheduler_type = 'reduce_lr_on_plateau' hears scores: give "
            "eval_strategy='epoch' (or 'steps'), and eval_dataset."
        )
    backend = getattr(read, "torch_compile_backend", None)
    if backend not in (None, "inductor"):
        raise TaskError(
            f"from_hf: torch_compile_backend = {backend!r} cannot be honoured: train.compile "
            "compiles with inductor."
        )


def _completed(read: SimpleNamespace) -> SimpleNamespace:
    """What TrainingArguments works out by itself, and a dict of arguments leaves open."""
    hears = read.lr_scheduler_type == "reduce_lr_on_plateau"
    if read.metric_for_best_model is None and (hears or read.load_best_model_at_end):
        read.metric_for_best_model = "loss"
    if read.greater_is_better is None:
        read.greater_is_better = not str(read.metric_for_best_model or "loss").endswith("loss")
    if isinstance(read.lr_scheduler_kwargs, str):
        read.lr_scheduler_kwargs = json.loads(read.lr_scheduler_kwargs)
    mode = (read.lr_scheduler_kwargs or {}).get("mode", "min")
    if hears and (mode == "max") != read.greater_is_better:
        warnings.warn(
            f"from_hf: reduce_lr_on_plateau takes {read.metric_for_best_model} for one to be made "
            f"{'large' if mode == 'max' else 'small'}, as it does in Trainer. Is that meant? "
            "lr_scheduler_kwargs={'mode': ...} says it.",
            stacklevel=4,
        )
    return read


def _plain(value: Any) -> Any:
    """What an enum of theirs stands for."""
    return getattr(value, "value", value)


def total_steps(read: SimpleNamespace, records: int) -> int:
    """As Trainer counts them."""
    if read.max_steps > 0:
        return read.max_steps
    per_epoch = steps_per_epoch(records, _batch(read))
    return math.ceil(read.num_train_epochs * per_epoch)


def _batch(read: SimpleNamespace) -> int:
    return read.per_device_train_batch_size * read.gradient_accumulation_steps


def hf_settings(read: SimpleNamespace, records: int, *, scored: bool) -> dict[str, Any]:
    train: dict[str, Any] = {
        "batch": _batch(read),
        "micro_batch": read.per_device_train_batch_size,
        "seed": read.seed,
    }
    whole = float(read.num_train_epochs).is_integer() and read.max_steps <= 0
    train |= (
        {"epochs": int(read.num_train_epochs)} if whole else {"steps": total_steps(read, records)}
    )
    if read.max_grad_norm and read.max_grad_norm > 0:
        train["clip_norm"] = float(read.max_grad_norm)
    if read.bf16 or read.fp16:
        train["precision"] = "bf16" if read.bf16 else "fp16"
    if read.torch_compile or getattr(read, "torch_compile_backend", None):
        train["compile"] = True
    config: dict[str, Any] = {"train": train}
    if read.logging_strategy == "steps":
        config["log"] = {"every_steps": _steps(read, "logging_steps", records)}
    if read.dataloader_num_workers:
        config["data"] = {"readers": read.dataloader_num_workers}
    checkpoint: dict[str, Any] = {}
    if read.save_strategy == "steps":
        checkpoint["every_steps"] = _steps(read, "save_steps", records)
    elif read.save_strategy == "epoch":
        checkpoint["every_steps"] = steps_per_epoch(records, _batch(read))
    if read.save_total_limit:
        checkpoint["keep_last"] = read.save_total_limit
    if read.eval_strategy != "no":
        if not scored:
            raise TaskError(f"from_hf: eval_strategy = {read.eval_strategy!r} needs eval_dataset.")
        config["evaluate"] = {"batch": read.per_device_eval_batch_size}
        if read.eval_strategy == "steps":
            name = "eval_steps" if read.eval_steps else "logging_steps"
            config["evaluate"]["every_steps"] = _steps(read, name, records)
        if read.lr_scheduler_type == "reduce_lr_on_plateau":
            config["evaluate"]["by"] = best_score(read)
    if read.load_best_model_at_end:
        checkpoint["keep_best"] = best_score(read)
    if checkpoint:
        config["checkpoint"] = checkpoint
    return config


def _steps(read: SimpleNamespace, name: str, records: int) -> int:
    """A number of steps, or (below 1) a part of all of them."""
    value = getattr(read, name)
    return int(value) if value >= 1 else math.ceil(value * total_steps(read, records))


def best_score(read: SimpleNamespace) -> str:
    """metric_for_best_model, as settings name it."""
    name = str(read.metric_for_best_model or "loss").removeprefix("eval_")
    if name == "loss":
        return "loss:max" if read.greater_is_better else "loss"
    return f"eval/{name}:{'max' if read.greater_is_better else 'min'}"


def take_callbacks(callbacks: Sequence[Any], read: SimpleNamespace, config: dict[str, Any]) -> None:
    """EarlyStoppingCallback is a setting; there are no others inside training. Those of
    transformers itself are meant: a subclass may do anything."""
    for callback in callbacks:
        kind = callback if isinstance(callback, type) else type(callback)
        theirs, name = kind.__module__.partition(".")[0] == "transformers", kind.__name__
        if theirs and name in ONLY_SHOW:
            continue
        if not theirs or name != "EarlyStoppingCallback" or isinstance(callback, type):
            raise TaskError(
                f"from_hf: the callback {name} cannot be honoured: there are no callbacks inside "
                "training. What changes weights after a step is Task(after_step=...); what only "
                "watches is mh.train(..., on_step=...)."
            )
        if callback.early_stopping_threshold:
            raise TaskError(
                "from_hf: EarlyStoppingCallback(early_stopping_threshold=...) cannot be honoured: "
                "any better score counts, and no other."
            )
        if "evaluate" not in config or read.metric_for_best_model is None:
            raise TaskError(
                "from_hf: EarlyStoppingCallback needs scores: eval_strategy, eval_dataset and "
                "metric_for_best_model."
            )
        config["evaluate"]["by"] = best_score(read)
        config["evaluate"]["stop_early"] = callback.early_stopping_patience
