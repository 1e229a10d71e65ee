# SPDX-License-Identifier: Apache-2.0
"""What Trainer's parameters are called, beside our names for them; and in which order they come."""

from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from manyhands.values.errors import TaskError

ALIASES = {
    "train_dataset": "dataset",
    "data_collator": "collator",
    "args": "arguments",
    "tokenizer": "processing_class",
}

INSTEAD = {
    "model_init": "give the function in place of the model.",
    "compute_loss_func": "mh.Task(loss=...) takes any loss.",
    "optimizers": "mh.Task(optimizer=..., schedule=...) takes any.",
    "optimizer_cls_and_kwargs": "mh.Task(optimizer=...) takes any.",
}

NAMES = (
    *ALIASES,
    *ALIASES.values(),
    *("model", "eval_dataset", "compute_metrics", "preprocess_logits_for_metrics", "callbacks"),
)


def by_our_names(ours: dict[str, Any], theirs: dict[str, Any], kind: type) -> dict[str, Any]:
    """`ours` with what was given by Trainer's own names; `kind` is TrainingArguments."""
    found = dict(ours)
    for name, value in theirs.items():
        if name in INSTEAD:
            if value not in (None, (None, None)):
                raise TaskError(f"from_hf: {name} cannot be honoured: {INSTEAD[name]}")
        elif name not in ALIASES:
            near = get_close_matches(name, NAMES, 1)
            hint = f"; did you mean {near[0]}?" if near else "."
            raise TaskError(f"from_hf takes no '{name}'{hint}")
        elif value is not None:
            if found[ALIASES[name]] is not None:
                raise TaskError(
                    f"from_hf: {name} and {ALIASES[name]} are the same; give one of them."
                )
            found[ALIASES[name]] = value
    _see_their_order(found["dataset"], kind)
    return found


def _see_their_order(dataset: Any, kind: type) -> None:
    if dataset is None:
        raise TaskError("from_hf: there is no data set to train on; give dataset=.")
    known = {f.name for f in fields(kind)}
    if isinstance(dataset, kind) or (isinstance(dataset, Mapping) and known.issuperset(dataset)):
        what = "a dict of arguments" if isinstance(dataset, Mapping) else type(dataset).__name__
        raise TaskError(
            f"from_hf: the data set is {what}. Trainer takes (model, args, data_collator, "
            "train_dataset), and from_hf (model, dataset, collator, arguments); or give them by "
            "their names, ours or Trainer's."
        )
