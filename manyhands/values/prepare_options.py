# SPDX-License-Identifier: Apache-2.0
"""What is asked of us when somebody wants records prepared: what of, into what, and with how much.

What decides the result is apart from what does not: `Making` and `Reading` from `Effort`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from manyhands.values.option_fields import CommandOption, argument, option
from manyhands.values.run_options import RayAccess

Pairs = Mapping[str, str] | Sequence[str]
"""COLUMN → VALUE, or texts COLUMN=VALUE."""

_READING = "How raw files are read"
_OUTPUT = "What is written"
_EFFORT = "Who does it"


@dataclass(frozen=True, kw_only=True)
class Making:
    """From which records what is made."""

    sources: str | Path | Iterable[Any] = field(
        kw_only=False, metadata=argument(str, "SOURCE...", many=True)
    )
    """Files, globs, folders or URLs: CSV, TSV, JSON lines, Parquet, Arrow, TFRecord, access logs,
    text, folders of images, IDX; gzip and zstd as they are."""
    to: str | Path = field(kw_only=False, metadata={"cli": CommandOption(Path)})
    """The folder to make."""
    label: str | None = option(None, cli=str)
    """The column to predict."""
    split: str | float | None = option(None, cli=str)
    """0.8 (of the records train, the others are held out; also ratio=0.8), ratio=0.8:0.1:0.1,
    time=COLUMN:0.8 (or :MOMENT), group=COLUMN:0.8, segment=COLUMN:VALUE,... (held out), or none.
    Left out: ratio=0.8."""
    folds: int = option(0, cli=int)
    """K folds instead; then train --fold I."""
    id: str | None = option(None, cli=str)
    """The column that names a record."""
    group: str | None = option(None, cli=str)
    """The column whose equal values stay on one side of a split."""
    roles: Pairs = option((), cli=str, many=True, flags=("--role",), metavar="COLUMN=ROLE")
    """feature, label, id, group, time, text, ..."""
    types: Pairs = option((), cli=str, many=True, flags=("--type",), metavar="COLUMN=TYPE")
    """int, float, string, bool, bytes, time; time:dmy, time:mdy or time:%d/%m/%Y: how it is
    written."""
    encode: Pairs = option((), cli=str, many=True, metavar="COLUMN=HOW")
    """standard, minmax, quantile, log, raw, vocabulary[:MAX], hash:BUCKETS, dates, words[:MAX],
    chars, bytes, image[:HxW[xC]], classes, number, drop."""
    missing: Pairs = option((), cli=str, many=True, metavar="COLUMN=HOW")
    """mean, zero, flag (adds a column), error."""
    pack: Pairs = option((), cli=str, many=True, metavar="NAME=PATTERN,...")
    """Stack columns into one: x=pixel*."""
    keep: Sequence[str] = option((), cli=str, many=True, metavar="PATTERN")
    """Keep these columns only."""
    drop: Sequence[str] = option((), cli=str, many=True, metavar="PATTERN")
    """Leave these columns out."""
    balance: str = option("", cli=str)
    """Unequal labels: weight (adds a column), under, over (resample)."""
    sample: float = option(1.0, cli=float)
    """Keep this fraction of the records."""
    like: str | Path | None = option(None, cli=Path)
    """Encode as this prepared folder does; fit nothing."""
    on_error: str = option("fail", cli=str)
    """fail, or skip:LIMIT: leave bad records out and list them."""
    seed: int = option(0, cli=int)
    """Of the order of records."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How raw files are read."""

    input_format: str | None = option(None, cli=str, flags=("--from",), panel=_READING)
    """csv, tsv, jsonl, parquet, arrow, tfrecord, log, text, images, idx; else found out."""
    delimiter: str | None = option(None, cli=str, panel=_READING)
    """Between fields; else found out."""
    header: str = option("auto", cli=str, panel=_READING)
    """yes, no, or auto: does the first line name the columns?"""
    names: str | Sequence[str] | None = option(None, cli=str, panel=_READING)
    """Names of the columns: a,b,c."""
    encoding: str = option("utf-8", cli=str, panel=_READING)
    """Of text: utf-8, latin-1, ..."""
    null: Sequence[str] = option((), cli=str, many=True, panel=_READING)
    """Another word for a missing value."""
    max_field: str | int = option("16MiB", cli=str, panel=_READING)
    """A longer field or line is an error."""
    unit: str = option("line", cli=str, panel=_READING)
    """Plain text: a record is a line or a paragraph."""
    window: int = option(0, cli=int, panel=_READING)
    """Plain text: records of N characters."""


@dataclass(frozen=True, kw_only=True)
class Output:
    """What is written."""

    format: str = option("arrow", cli=str, panel=_OUTPUT)
    """arrow, parquet or tfrecord."""
    compression: str = option("", cli=str, panel=_OUTPUT)
    """lz4 or zstd."""
    shard_size: str | int = option("64MiB", cli=str, panel=_OUTPUT)
    """Of a shard, about."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Who does it, and with how much: no byte of the result depends on it."""

    workers: int | None = option(None, cli=int, panel=_EFFORT)
    """Processes. Left out: cores."""
    memory: str | int = option("1GiB", cli=str, panel=_EFFORT)
    """For each process."""
    engine: str = option("local", cli=str, metavar="local, ray or ray://HOST:PORT", panel=_EFFORT)
    """Processes of this host, or tasks of Ray."""
    restart: bool = option(False, cli=bool, flags=("--restart/--no-restart",), panel=_EFFORT)
    """Forget an interrupted attempt."""
    quiet: bool = True
    """Print errors only."""


@dataclass(frozen=True, kw_only=True)
class PrepareRequest(RayAccess, Effort, Output, Reading, Making):
    """Records that are to be prepared."""
