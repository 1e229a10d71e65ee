# SPDX-License-Identifier: Apache-2.0
"""Words that people use in the wrong place, and where they belong."""

import difflib
from collections.abc import Iterable

OF_THE_OPTIMIZER = (
    *("lr", "learning_rate", "weight_decay", "momentum", "betas", "eps", "nesterov", "dampening"),
    *("amsgrad", "alpha", "rho", "lr_decay"),
)
OTHER_SETTINGS = {
    "batch_size": "train.batch",
    "bs": "train.batch",
    "num_epochs": "train.epochs",
    "n_epochs": "train.epochs",
    "max_epochs": "train.epochs",
    "max_steps": "train.steps",
    "num_steps": "train.steps",
    "random_seed": "train.seed",
    "grad_clip": "train.clip_norm",
    "max_grad_norm": "train.clip_norm",
    "gradient_clip_val": "train.clip_norm",
    "num_threads": "train.threads",
}
"""What other libraries call it → what it is called here."""


def of_the_optimizer(name: str) -> str | None:
    """The optimizer's own name for it, if it is one of its hyper-parameters."""
    return {"learning_rate": "lr"}.get(name, name) if name in OF_THE_OPTIMIZER else None


def where_it_lives(name: str, value: str) -> str:
    """About a hyper-parameter that was given as a setting of the run."""
    return (
        f"{name} is no setting of a run: it lives in the task's optimizer. To give it for a run, "
        f"make it a parameter of the task, def task({name}=...): return mh.Task(...), and write "
        f"--param {name}={value}; while a run trains: manyhands set RUN {name}={value}"
    )


def setting_called(name: str, settings: Iterable[str]) -> str | None:
    """The setting (of the run, not of its task) that is meant by a bare name, if it is clear."""
    found = [path for path in settings if path.partition(".")[2] == name]
    clear = len(found) == 1 or found[:1] == [f"train.{name}"]
    return OTHER_SETTINGS.get(name) or (found[0] if clear else None)


def meant(word: str, known: Iterable[str], sure: str | None = None) -> str:
    """The end of a sentence about a word that is not known: the nearest right one, and all."""
    known = list(known)
    close = [sure] if sure else difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    question = f"; did you mean '{close[0]}'?" if close else "."
    return f"{question} There are: {', '.join(known)}."
