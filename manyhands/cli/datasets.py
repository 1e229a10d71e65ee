# SPDX-License-Identifier: Apache-2.0
"""Commands about data: make a prepared folder of raw records, and look at one."""

import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from manyhands.cli.hosts import RayTokenFile, WorkerResources
from manyhands.values.errors import DataDamaged, DataTaskFailed, ManyhandsError, RunFailed

Many = list[str] | None

_IN = "How raw files are read"
_OUT = "What is written"
_WHO = "Who does it"


def prepare(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE...",
            help="Files, globs, folders or URLs: CSV, TSV, JSON lines, Parquet, Arrow, TFRecord, "
            "access logs, text, folders of images, IDX; gzip and zstd as they are.",
        ),
    ],
    to: Annotated[Path, typer.Option(help="The folder to make.")],
    label: Annotated[str | None, typer.Option(help="The column to predict.")] = None,
    split: Annotated[
        str | None,
        typer.Option(
            help="ratio=0.8[:0.1:0.1], time=COLUMN:0.8 (or :MOMENT), group=COLUMN:0.8, "
            "segment=COLUMN:VALUE,... (held out), or none. Left out: ratio=0.8."
        ),
    ] = None,
    folds: Annotated[int, typer.Option(help="K folds instead; then train --fold I.")] = 0,
    id: Annotated[str | None, typer.Option(help="The column that names a record.")] = None,
    role: Annotated[
        Many, typer.Option(metavar="COLUMN=ROLE", help="feature, label, id, group, time, text, ...")
    ] = None,
    type: Annotated[
        Many, typer.Option(metavar="COLUMN=TYPE", help="int, float, string, bool, time, bytes.")
    ] = None,
    encode: Annotated[
        Many,
        typer.Option(
            metavar="COLUMN=HOW",
            help="standard, minmax, quantile, log, raw, vocabulary[:MAX], hash:BUCKETS, dates, "
            "words[:MAX], chars, bytes, image[:HxW[xC]], classes, number, drop.",
        ),
    ] = None,
    missing: Annotated[
        Many, typer.Option(metavar="COLUMN=HOW", help="mean, zero, flag (adds a column), error.")
    ] = None,
    pack: Annotated[
        Many, typer.Option(metavar="NAME=PATTERN,...", help="Stack columns into one: x=pixel*.")
    ] = None,
    keep: Annotated[Many, typer.Option(metavar="PATTERN", help="Keep these columns only.")] = None,
    drop: Annotated[Many, typer.Option(metavar="PATTERN", help="Leave these columns out.")] = None,
    balance: Annotated[
        str, typer.Option(help="Unequal labels: weight (adds a column), under, over (resample).")
    ] = "",
    sample: Annotated[float, typer.Option(help="Keep this fraction of the records.")] = 1.0,
    like: Annotated[
        Path | None, typer.Option(help="Encode as this prepared folder does; fit nothing.")
    ] = None,
    on_error: Annotated[
        str, typer.Option(help="fail, or skip:LIMIT: leave bad records out and list them.")
    ] = "fail",
    seed: Annotated[int, typer.Option(help="Of the order of records.")] = 0,
    input_format: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="csv, tsv, jsonl, parquet, arrow, tfrecord, log, text, images, idx; else found "
            "out.",
            rich_help_panel=_IN,
        ),
    ] = None,
    delimiter: Annotated[
        str | None, typer.Option(help="Between fields; else found out.", rich_help_panel=_IN)
    ] = None,
    header: Annotated[
        str,
        typer.Option(
            help="yes, no, or auto: does the first line name the columns?", rich_help_panel=_IN
        ),
    ] = "auto",
    names: Annotated[
        str | None, typer.Option(help="Names of the columns: a,b,c.", rich_help_panel=_IN)
    ] = None,
    encoding: Annotated[
        str, typer.Option(help="Of text: utf-8, latin-1, ...", rich_help_panel=_IN)
    ] = "utf-8",
    null: Annotated[
        Many, typer.Option(help="Another word for a missing value.", rich_help_panel=_IN)
    ] = None,
    max_field: Annotated[
        str, typer.Option(help="A longer field or line is an error.", rich_help_panel=_IN)
    ] = "16MiB",
    unit: Annotated[
        str,
        typer.Option(help="Plain text: a record is a line or a paragraph.", rich_help_panel=_IN),
    ] = "line",
    window: Annotated[
        int, typer.Option(help="Plain text: records of N characters.", rich_help_panel=_IN)
    ] = 0,
    format: Annotated[
        str, typer.Option(help="arrow, parquet or tfrecord.", rich_help_panel=_OUT)
    ] = "arrow",
    compression: Annotated[str, typer.Option(help="lz4 or zstd.", rich_help_panel=_OUT)] = "",
    shard_size: Annotated[
        str, typer.Option(help="Of a shard, about.", rich_help_panel=_OUT)
    ] = "64MiB",
    workers: Annotated[
        int | None, typer.Option(help="Processes. Left out: cores.", rich_help_panel=_WHO)
    ] = None,
    memory: Annotated[str, typer.Option(help="For each process.", rich_help_panel=_WHO)] = "1GiB",
    engine: Annotated[
        str,
        typer.Option(
            metavar="local, ray or ray://HOST:PORT",
            help="Processes of this host, or tasks of Ray.",
            rich_help_panel=_WHO,
        ),
    ] = "local",
    worker_resources: WorkerResources = None,
    ray_token_file: RayTokenFile = None,
    restart: Annotated[
        bool, typer.Option(help="Forget an interrupted attempt.", rich_help_panel=_WHO)
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the manifest's figures.")] = False,
) -> None:
    """Turn raw records into a data set: checked, split, encoded, shuffled, in shards."""
    from manyhands.stories import prepare, show_data

    with _told(), _resumable():
        prepare.prepare(
            sources,
            to,
            engine=engine,
            worker_resources=worker_resources,
            ray_token_file=ray_token_file,
            label=label,
            split=split,
            folds=folds,
            id=id,
            roles=role or [],
            types=type or [],
            encode=encode or [],
            missing=missing or [],
            pack=pack or [],
            keep=keep or [],
            drop=drop or [],
            balance=balance,
            sample=sample,
            like=like,
            on_error=on_error,
            seed=seed,
            input_format=input_format,
            delimiter=delimiter,
            header=header,
            names=names.split(",") if names else None,
            encoding=encoding,
            null=null or [],
            max_field=max_field,
            unit=unit,
            window=window,
            format=format,
            compression=compression,
            shard_size=shard_size,
            workers=workers,
            memory=memory,
            restart=restart,
            quiet=quiet or json,
        )
    if json:
        print(_json(show_data.figures(to)))
    elif not quiet:
        show_data.show(to, rows=0, notes=False)


def data(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="A prepared folder, or its URL.")],
    verify: Annotated[bool, typer.Option("--verify", help="Check every byte.")] = False,
    rows: Annotated[int, typer.Option(help="How many records to show.")] = 3,
    split: Annotated[str | None, typer.Option(help="Show records of this split.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Answer in JSON.")] = False,
) -> None:
    """What a prepared folder holds: schema, statistics, samples; --verify checks every byte."""
    from manyhands.stories import show_data

    with _told():
        damage = show_data.damage(folder, quiet=json) if verify else []
        if json:
            figures = show_data.figures(folder)
            print(_json({**figures, **({"damage": damage} if verify else {})}))
        elif not verify:
            show_data.show(folder, rows=rows, split=split)
        if damage:
            raise DataDamaged("\n".join(damage))
    if verify and not json:
        print(f"{show_data.name_of(folder)}: every byte is as it was written")


@contextmanager
def _resumable() -> Generator[None]:
    try:
        yield
    except KeyboardInterrupt:
        print("manyhands: interrupted; the same command goes on from here", file=sys.stderr)
        raise typer.Exit(130) from None


@contextmanager
def _told() -> Generator[None]:
    """Errors in lines that fit a terminal. Work that crashed, though nothing was wrong with what
    was asked for, is a run that failed."""
    from manyhands.values.wrapping import wrapped

    name = "manyhands: "
    try:
        yield
    except DataTaskFailed as error:
        raise RunFailed(wrapped(f"{name}{error}")) from error
    except ManyhandsError as error:
        error.args = (wrapped(str(error), first=len(name)),)
        raise


def register(app: typer.Typer) -> None:
    app.command("prepare")(prepare)
    app.command("data")(data)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
