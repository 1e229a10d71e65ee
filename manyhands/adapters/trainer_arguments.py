# SPDX-License-Identifier: Apache-2.0
"""What was given to Lightning's Trainer → settings; what cannot be one is refused by name."""

import warnings
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from manyhands.accounting.deal_micro_batches import steps_per_epoch
from manyhands.values.errors import TaskError

PRECISIONS = {
    **dict.fromkeys((None, 32, "32", "32-true"), "fp32"),
    **dict.fromkeys(("bf16", "bf16-mixed"), "bf16"),
    **dict.fromkeys((16, "16", "16-mixed"), "fp16"),
}

ELSEWHERE = {
    "devices": "how many workers there are is said when it is trained: --workers 4.",
    "num_nodes": "other machines join a run: docs/hosts.md.",
    "strategy": "workers agree in one way, exactly.",
    "sync_batchnorm": "BatchNorm sees a micro-batch: train.micro_batch.",
    "max_time": "manyhands train --finish-by 2h.",
    "limit_train_batches": "give fewer records, or max_steps.",
    "limit_val_batches": "give fewer records.",
    "overfit_batches": "give fewer records, or max_steps.",
    "fast_dev_run": "max_steps=3.",
    "reload_dataloaders_every_n_epochs": "records are found by their numbers, all the time.",
    "min_epochs": "a run ends early for want of better scores alone.",
    "min_steps": "a run ends early for want of better scores alone.",
}

NO_EFFECT = {
    "accelerator": ("auto", "cpu"),
    "logger": None,
    "enable_checkpointing": None,
    "enable_progress_bar": None,
    "enable_model_summary": None,
    "enable_autolog_hparams": None,
    "num_sanity_val_steps": None,
    "deterministic": None,
    "benchmark": None,
    "inference_mode": None,
    "use_distributed_sampler": None,
    "default_root_dir": None,
}
"""What changes nothing here, and the values for which that is so (None: all)."""

HONOURED = (
    *("max_epochs", "max_steps", "accumulate_grad_batches", "precision", "callbacks"),
    *("gradient_clip_val", "gradient_clip_algorithm", "log_every_n_steps"),
    *("check_val_every_n_epoch", "val_check_interval"),
)

ONLY_SHOW = {
    "ProgressBar",
    "ModelSummary",
    "LearningRateMonitor",
    "DeviceStatsMonitor",
    "ThroughputMonitor",
}

INSTEAD = {
    "StochasticWeightAveraging": "train.swa = 1 keeps the mean of the weights after each epoch.",
    "EMAWeightAveraging": "train.ema = 0.999 keeps a moving average.",
    "WeightAveraging": "train.ema and train.swa keep averages of the weights.",
    "GradientAccumulationScheduler": "a run's batch stays the same.",
    "BatchSizeFinder": "train.micro_batch says what is computed at once.",
    "Timer": "manyhands train --finish-by 2h.",
    "BackboneFinetuning": "give parameter groups, and a schedule that raises their lr from 0.",
}


@dataclass(frozen=True)
class LoaderSizes:
    """Of the loaders: how many records there are, and in what batches."""

    records: int
    batch: int
    drop_last: bool
    scored_batch: int | None
    """None: nothing is held out."""

    def per_epoch(self, batch: int) -> int:
        whole = self.records // batch if self.drop_last else 0
        return whole or steps_per_epoch(self.records, batch)


def settings_of(given: dict[str, Any], data: LoaderSizes) -> dict[str, Any]:
    """A config. `given` are arguments of Trainer."""
    rest = {name: value for name, value in given.items() if value is not None}
    for name in rest.keys() & ELSEWHERE.keys():
        if rest[name] not in (1, "auto", False) or name in ("overfit_batches",):
            raise _refused(name, ELSEWHERE[name])
        del rest[name]
    for name in rest.keys() & NO_EFFECT.keys():
        allowed = NO_EFFECT[name]
        if allowed is not None and rest[name] not in allowed:
            raise _refused(
                name, f"it may be {' or '.join(allowed)}; train.device = 'cuda' is ours."
            )
        del rest[name]
    train = _train(rest, data)
    config: dict[str, Any] = {"train": train}
    per_epoch = data.per_epoch(train["batch"])
    if data.scored_batch is not None:
        config["evaluate"] = _evaluate(rest, data.scored_batch, per_epoch)
    if (every := rest.pop("log_every_n_steps", None)) is not None:
        config["log"] = {"every_steps": every}
    callbacks: Any = rest.pop("callbacks", [])
    for callback in callbacks if isinstance(callbacks, list | tuple) else [callbacks]:
        _take_callback(callback, config, per_epoch)
    for name in ("check_val_every_n_epoch", "val_check_interval"):
        rest.pop(name, None)
    if rest:
        near = get_close_matches(min(rest), [*HONOURED, *NO_EFFECT], 1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise _refused(min(rest), f"there is no setting for it.{hint}")
    return config


def _refused(name: str, why: str) -> TaskError:
    return TaskError(f"from_lightning: {name} cannot be honoured: {why}")


def _train(rest: dict[str, Any], data: LoaderSizes) -> dict[str, Any]:
    parts = rest.pop("accumulate_grad_batches", 1)
    train: dict[str, Any] = {"batch": data.batch * parts}
    if parts > 1:
        train["micro_batch"] = data.batch
    epochs, steps = rest.pop("max_epochs", None), rest.pop("max_steps", -1)
    if epochs not in (None, -1) and steps != -1:
        raise _refused("max_epochs with max_steps", "give one of them.")
    if steps != -1:
        train["steps"] = steps
    elif epochs == -1:
        raise _refused("max_epochs=-1", "a run has an end: give max_epochs, or max_steps.")
    elif epochs is not None:
        train["epochs"] = epochs
    else:
        warnings.warn(
            "from_lightning: max_epochs was not given: one epoch. Lightning's default is 1000.",
            stacklevel=4,
        )
    if (clip := rest.pop("gradient_clip_val", None)) is not None:
        train["clip_norm"] = float(clip)
    algorithm = rest.pop("gradient_clip_algorithm", "norm")
    if getattr(algorithm, "value", algorithm) != "norm":
        raise _refused("gradient_clip_algorithm='value'", "gradients are clipped by their norm.")
    precision = rest.pop("precision", None)
    if precision not in PRECISIONS:
        raise _refused(f"precision={precision!r}", "it may be 32, 'bf16-mixed' or '16-mixed'.")
    if PRECISIONS[precision] != "fp32":
        train["precision"] = PRECISIONS[precision]
    return train


def _evaluate(rest: dict[str, Any], batch: int, per_epoch: int) -> dict[str, Any]:
    evaluate: dict[str, Any] = {"batch": batch}
    epochs, interval = rest.get("check_val_every_n_epoch", 1), rest.get("val_check_interval", 1.0)
    if isinstance(interval, int):
        evaluate["every_steps"] = interval
    elif interval != 1.0:
        raise _refused("val_check_interval", "give a whole number of steps (evaluate.every_steps).")
    elif epochs != 1:
        evaluate["every_steps"] = epochs * per_epoch
    return evaluate


def _take_callback(callback: Any, config: dict[str, Any], per_epoch: int) -> None:
    """Lightning's own alone: a subclass may do anything."""
    kinds = [base.__name__ for base in type(callback).__mro__]
    theirs = type(callback).__module__.partition(".")[0] in ("lightning", "pytorch_lightning")
    if theirs and kinds[0] == "EarlyStopping":
        _early_stopping(callback, config)
    elif theirs and kinds[0] == "ModelCheckpoint":
        _model_checkpoint(callback, config, per_epoch)
    elif not theirs or not ONLY_SHOW & set(kinds):
        why = next((INSTEAD[kind] for kind in kinds if kind in INSTEAD), None)
        raise _refused(
            f"the callback {kinds[0]}",
            why
            or "there are no callbacks inside training. What changes weights after a step is "
            "Task(after_step=...); what only watches is mh.train(..., on_step=...).",
        )


def _early_stopping(callback: Any, config: dict[str, Any]) -> None:
    for name, usual in (
        ("min_delta", 0),
        ("stopping_threshold", None),
        ("divergence_threshold", None),
    ):
        if getattr(callback, name) != usual:
            raise _refused(f"EarlyStopping({name}=...)", "any better score counts, and no other.")
    evaluate = _evaluated(config, "EarlyStopping")
    evaluate["by"] = f"{callback.monitor}:{callback.mode}"
    evaluate["stop_early"] = callback.patience


def _model_checkpoint(callback: Any, config: dict[str, Any], per_epoch: int) -> None:
    checkpoint = config.setdefault("checkpoint", {})
    if callback.monitor is not None:
        _evaluated(config, "ModelCheckpoint")
        if callback.save_top_k > 1:
            raise _refused(
                f"ModelCheckpoint(save_top_k={callback.save_top_k})",
                "the best step is kept (checkpoint.keep_best), and the last ones "
                "(checkpoint.keep_last).",
            )
        if callback.save_top_k:
            checkpoint["keep_best"] = f"{callback.monitor}:{callback.mode}"
    if callback.save_top_k == -1:
        checkpoint["keep_last"] = 1_000_000
    steps = getattr(callback, "_every_n_train_steps", 0)
    epochs = getattr(callback, "_every_n_epochs", 1)
    every = getattr(callback, "_train_time_interval", None)
    if every is not None:
        checkpoint["every_s"] = every.total_seconds()
    elif steps:
        checkpoint["every_steps"] = steps
    elif epochs:
        checkpoint["every_steps"] = epochs * per_epoch


def _evaluated(config: dict[str, Any], who: str) -> dict[str, Any]:
    if "evaluate" not in config:
        raise _refused(who, "its monitor is a score of held-out records: give a val_dataloader.")
    return config["evaluate"]
