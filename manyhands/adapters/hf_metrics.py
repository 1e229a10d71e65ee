# SPDX-License-Identifier: Apache-2.0
"""compute_metrics of Hugging Face's Trainer as a score, and what it is given.

Batches are put together as Trainer does it: in their order, those with fewer columns (each is
padded to its own longest) filled up with -100.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torchmetrics import Metric as TorchMetric

from manyhands.values.errors import TaskError


class HfMetrics(TorchMetric):
    """Keeps all predictions and labels; has no states that could be merged, so that it is shown
    the batches in their order."""

    full_state_update = False

    def __init__(self, compute_metrics: Callable[[Any], Mapping[str, float]]) -> None:
        super().__init__()
        self.compute_metrics = compute_metrics
        self.add_state("shown", default=[], dist_reduce_fx=None)

    def update(self, predictions: Tensor, labels: Tensor) -> None:
        shown: Any = self.shown
        shown.append((predictions, labels))

    def compute(self) -> dict[str, float]:
        from transformers import EvalPrediction
        from transformers.trainer_pt_utils import nested_concat, nested_numpify

        shown: Any = self.shown
        whole = shown[0]
        for part in shown[1:]:
            whole = nested_concat(whole, part, padding_index=-100)
        found = self.compute_metrics(EvalPrediction(*nested_numpify(whole)))
        return {name.removeprefix("eval_"): float(value) for name, value in found.items()}


def predictions_in(outputs: Any, model: Any) -> Any:
    """What Trainer would call predictions: all that the model gives but its loss, and what its
    config says to ignore. Here that must be one tensor."""
    if not isinstance(outputs, Mapping):
        outputs = dict(enumerate(outputs))
        if len(outputs) > 1:
            del outputs[0]  # the loss
    ignored = getattr(getattr(model, "config", None), "keys_to_ignore_at_inference", [])
    found = {k: v for k, v in outputs.items() if k != "loss" and k not in ignored}
    if len(found) == 1:
        return next(iter(found.values()))
    names = ", ".join(str(name) for name in found)
    raise TaskError(
        f"{type(model).__name__} gives {names}, and compute_metrics would be given a tuple of "
        "them. Name those that it does not need: model.config.keys_to_ignore_at_inference = "
        f"{list(found)[1:]}."
    )
