# SPDX-License-Identifier: Apache-2.0
"""What is asked of us when somebody wants to know what a trained model says of records."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from manyhands.values.option_fields import argument, option
from manyhands.values.prepare_options import Reading
from manyhands.values.run_options import RayAccess
from manyhands.values.task import Task


@dataclass(frozen=True, kw_only=True)
class PredictedData:
    """By which run, of which records."""

    run: str | Path = field(kw_only=False, metadata=argument(Path, "RUN"))
    """The run's folder."""
    data: Any = field(default=(), kw_only=False, metadata=argument(str, "FILE...", many=True))
    """Raw files, folders, globs or URLs, as for prepare; or a prepared folder. Left out: the
    records that the task holds out. From Python also records, columns or a Dataset."""
    task: Task | None = None
    """The task again, where it was made in Python."""
    split: str | None = option(None, cli=str)
    """Of a prepared folder; left out: what it holds out."""
    step: int | None = option(None, cli=int)
    """A saved step; left out, the newest one."""
    weights: str = option("trained", cli=str)
    """trained, or an average that was saved beside them: ema, swa."""


@dataclass(frozen=True, kw_only=True)
class PredictedColumns:
    """What is said of each record."""

    keep: str | Sequence[str] = option((), cli=str, many=True, metavar="COLUMN,...")
    """Columns of the raw records that go into the result. Repeatable."""
    classes: str | Sequence[str] | None = option(None, cli=str, metavar="A,B,...")
    """Names of the classes in the order of their numbers; else those of the label."""
    every_class: bool = option(False, cli=bool)
    """The probability of each class, also of more than 10."""
    outputs: str | None = option(None, cli=str)
    """Of one number for two classes: logits, probabilities or numbers; else found out."""
    score: bool = option(False, cli=bool)
    """The records have a label: score the predictions, too."""


@dataclass(frozen=True, kw_only=True)
class PredictRequest(RayAccess, Reading, PredictedColumns, PredictedData):
    """Records of which a trained model is to say something."""

    to: str | Path | None = option(None, cli=Path, metavar="FILE")
    """The file to write: .parquet, .csv, .jsonl or .arrow."""
    on_error: str = option("list", cli=str)
    """Bad records: list (each has a row that says what is wrong; exit code 1), skip:LIMIT (the
    same, exit code 0 for up to so many), fail (no file)."""
    workers: int = option(1, cli=int)
    """Processes. No byte of the result depends on it."""
    engine: str = option("local", cli=str, metavar="local, ray or ray://HOST:PORT")
    """Processes of this host; or tasks of Ray, as many as there is room for, or as `workers` says
    where that is more than 1."""
    memory: str | int = option("256MiB", cli=str)
    """For what each process reads at a time, about; the model comes on top."""
    batch: int | None = option(None, cli=int)
    """Records in a forward pass; left out: evaluate.batch, else train.batch."""
    quiet: bool = option(False, cli=bool, flags=("--quiet", "-q"))
    """Print warnings and errors only."""
