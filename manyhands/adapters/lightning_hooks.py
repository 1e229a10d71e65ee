# SPDX-License-Identifier: Apache-2.0
"""Which of a LightningModule's hooks cannot be honoured, and what to do instead."""

from typing import Any

from manyhands.values.errors import TaskError

_GRADIENTS = (
    "gradients of micro-batches are added up over all workers, and no worker sees them whole."
)
_BATCHES = (
    "it would run once for each micro-batch, in whichever worker computes it. What changes weights "
    "after a step is Task(after_step=...); a moving average is train.ema = 0.999."
)
_EPOCHS = (
    "an epoch has no moment of its own in a worker. Log in training_step; log torchmetrics objects "
    "themselves (self.log('acc', self.acc)), which are reset and merged for you."
)
_SCORED = (
    "held-out batches are scored by several workers. Log in validation_step; log torchmetrics "
    "objects themselves (self.log('acc', self.acc)), which are reset and merged for you."
)
_KEPT = "a checkpoint holds parameters and buffers: keep it in a buffer (register_buffer)."
_ENDS = "workers come and go, so a run has no such moment in a worker. Do it in __init__ or setup."

REFUSED = {
    "backward": _GRADIENTS,
    "on_before_backward": _GRADIENTS,
    "on_after_backward": _GRADIENTS,
    "on_before_optimizer_step": _GRADIENTS,
    "on_before_zero_grad": _GRADIENTS,
    "optimizer_zero_grad": _GRADIENTS,
    "optimizer_step": "steps are taken by all workers together, each on a part of the weights. "
    "Warm-up belongs into a scheduler.",
    "configure_gradient_clipping": "give gradient_clip_val (train.clip_norm).",
    "lr_scheduler_step": "schedulers are stepped as torch's are: step(), or step(score).",
    "on_train_batch_start": _BATCHES,
    "on_train_batch_end": _BATCHES,
    "on_train_epoch_start": _EPOCHS,
    "on_train_epoch_end": _EPOCHS,
    "on_validation_epoch_start": _SCORED,
    "on_validation_epoch_end": _SCORED,
    "on_validation_batch_start": _SCORED,
    "on_validation_batch_end": _SCORED,
    "on_validation_start": _SCORED,
    "on_validation_end": _SCORED,
    "on_validation_model_eval": _SCORED,
    "on_validation_model_train": _SCORED,
    "on_fit_start": _ENDS,
    "on_fit_end": _ENDS,
    "on_train_start": _ENDS,
    "on_train_end": _ENDS,
    "on_save_checkpoint": _KEPT,
    "on_load_checkpoint": _KEPT,
    "configure_model": "build the model in __init__.",
    "configure_sharded_model": "build the model in __init__.",
    "configure_callbacks": "give callbacks= to from_lightning.",
    "transfer_batch_to_device": "batches are moved for you.",
}

OF_DATA = {
    "on_before_batch_transfer": "put it in the module, or in the data set.",
    "on_after_batch_transfer": "put it in the module, or in the data set.",
    "transfer_batch_to_device": "batches are moved for you.",
    "state_dict": "which records come next follows from seed and step.",
    "load_state_dict": "which records come next follows from seed and step.",
}


def lightning_base(given: Any, kind: str) -> type | None:
    """The class of that name among its ancestors, of `lightning` or of `pytorch_lightning`."""
    for base in type(given).__mro__:
        package = base.__module__.partition(".")[0]
        if base.__name__ == kind and package in ("lightning", "pytorch_lightning"):
            return base
    return None


def overrides(given: Any, kind: str, name: str) -> bool:
    """Whether its class, or it itself, has a method of its own in place of Lightning's."""
    base = lightning_base(given, kind)
    own = getattr(type(given), name, None)
    return name in vars(given) or (own is not None and own is not getattr(base, name, None))


def refuse_hooks(given: Any, kind: str, refused: dict[str, str]) -> None:
    for name, why in refused.items():
        if overrides(given, kind, name):
            raise TaskError(f"{type(given).__name__}.{name} cannot be honoured: {why}")


def refuse_module(module: Any) -> None:
    kind = type(module).__name__
    if not module.automatic_optimization:
        raise TaskError(
            f"{kind}.automatic_optimization = False cannot be honoured: with manual optimization "
            "the order of steps is in the user's code. Write it as mh.Task(optimizer={'d': ..., "
            "'g': ...}, loss={'d': ..., 'g': ...}): each optimizer with its loss, in their order."
        )
    if getattr(module, "truncated_bptt_steps", 0):
        raise TaskError(
            f"{kind}.truncated_bptt_steps cannot be honoured: a step would begin with what the "
            "one before it left in a worker. Cut the sequences into records."
        )
    if not overrides(module, "LightningModule", "training_step"):
        raise TaskError(f"{kind} has no training_step.")
    if not overrides(module, "LightningModule", "configure_optimizers"):
        raise TaskError(f"{kind} has no configure_optimizers.")
    refuse_hooks(module, "LightningModule", REFUSED)
