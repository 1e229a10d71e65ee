# SPDX-License-Identifier: Apache-2.0
"""The loss as Hugging Face's Trainer computes it: the model's own, or with smoothed labels; and how
much a micro-batch counts: by its labels that are not -100 where Trainer counts items, else by its
records. On held-out records a batch counts by its records, as in Trainer's eval_loss."""

import inspect
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from torch import Tensor
from torch.nn import Module

from manyhands.values.errors import TaskError


def counting(model: Any, takes: Mapping[str, inspect.Parameter]) -> tuple[bool, bool]:
    """Whether the loss is a mean over labels (as Trainer finds it out), and over shifted ones."""
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

    some = any(p.kind == inspect.Parameter.VAR_KEYWORD for p in takes.values())
    by_items = bool(getattr(model, "accepts_loss_kwargs", some))
    encodes = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    kind = LOSS_MAPPING.get(str(getattr(model, "loss_type", "")))
    return by_items, kind is ForCausalLMLoss and not encodes


@dataclass(frozen=True)
class Smoothing:
    """label_smoothing_factor."""

    factor: float
    shifts: bool
    """Logits are of the next token."""

    def __call__(self, outputs: Any, labels: Tensor, items: Tensor | None) -> Tensor:
        from transformers.trainer_pt_utils import LabelSmoother

        smoother = LabelSmoother(epsilon=self.factor)
        return smoother(outputs, labels, shift_labels=self.shifts, num_items_in_batch=items)


def smoothing(read: SimpleNamespace, model: Any) -> Smoothing | None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    if not read.label_smoothing_factor:
        return None
    kind = getattr(getattr(model, "config", None), "problem_type", None)
    if kind == "multi_label_classification":
        warnings.warn(
            "from_hf: labels of multi-label classification are not smoothed.", stacklevel=3
        )
        return None
    return Smoothing(read.label_smoothing_factor, model._get_name() in CAUSAL.values())


@dataclass(frozen=True)
class HfLoss:
    smoothing: Smoothing | None
    by_items: bool
    shifted: bool

    def __call__(self, model: Module, batch: dict[str, Any]) -> Any:
        items = self._items(batch)
        inputs, labels = dict(batch), None
        if self.smoothing is not None:
            labels = inputs.pop("labels", None)
        given = items
        if items is not None:
            # A mean over no labels is no number; without gradients it is Trainer's.
            given = items.clamp(min=1) if model.training else items
            inputs["num_items_in_batch"] = given
        outputs: Any = model(**inputs)
        if self.smoothing is not None and labels is not None:
            loss = self.smoothing(outputs, labels, given)
        else:
            loss = _loss_in(outputs, model, batch)
        return loss if items is None or not model.training else (loss, items)

    def _items(self, batch: dict[str, Any]) -> Tensor | None:
        """How many labels there are; None: micro-batches count by their records."""
        labels = batch.get("labels")
        if not self.by_items or not isinstance(labels, Tensor):
            return None
        counted = labels[..., 1:] if self.shifted else labels
        return batch.get("shift_labels", counted).ne(-100).sum()


def _loss_in(outputs: Any, model: Module, batch: dict[str, Any]) -> Any:
    if isinstance(outputs, Mapping) and "loss" not in outputs:
        raise TaskError(
            f"{type(model).__name__} returned no loss, only {', '.join(outputs)}; it was given "
            f"{', '.join(batch)}. Are there labels?"
        )
    return outputs["loss"] if isinstance(outputs, Mapping) else outputs[0]
