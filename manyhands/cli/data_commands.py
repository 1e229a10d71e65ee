# SPDX-License-Identifier: Apache-2.0
"""Commands about data: make a prepared folder of raw records, and look at one."""

import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated

import typer

from manyhands.cli.options_from_requests import options_of
from manyhands.cli.printing import to_json
from manyhands.cli.shared_arguments import JsonFlag
from manyhands.values.errors import DataDamaged, DataTaskFailed, ManyhandsError, RunFailed
from manyhands.values.prepare_options import PrepareRequest


@options_of(PrepareRequest)
def prepare(
    request: PrepareRequest,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the manifest's figures.")] = False,
) -> None:
    """Turn raw records into a data set: checked, split, encoded, shuffled, in shards."""
    from manyhands.stories import show_data
    from manyhands.stories.prepare import prepare_request

    with _told(), _resumable():
        prepare_request(replace(request, quiet=quiet or json))
    if json:
        print(to_json(show_data.figures(request.to)))
    elif not quiet:
        show_data.show(request.to, rows=0, notes=False)


def data(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="A prepared folder, or its URL.")],
    verify: Annotated[bool, typer.Option("--verify", help="Check every byte.")] = False,
    rows: Annotated[int, typer.Option(help="How many records to show.")] = 3,
    split: Annotated[str | None, typer.Option(help="Show records of this split.")] = None,
    json: JsonFlag = False,
) -> None:
    """What a prepared folder holds: schema, statistics, samples; --verify checks every byte."""
    from manyhands.stories import show_data

    with _told():
        damage = show_data.damage(folder, quiet=json) if verify else []
        if json:
            figures = show_data.figures(folder)
            print(to_json({**figures, **({"damage": damage} if verify else {})}))
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
    from manyhands.values.wrap_text import wrapped

    name = "manyhands: "
    try:
        yield
    except DataTaskFailed as error:
        raise RunFailed(wrapped(f"{name}{error}")) from error
    except ManyhandsError as error:
        error.args = (wrapped(str(error), first=len(name)),)
        raise
