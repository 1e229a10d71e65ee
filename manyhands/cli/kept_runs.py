# SPDX-License-Identifier: Apache-2.0
"""Commands about the runs that are kept: list them, compare them, remove them."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from manyhands.cli.printing import to_json
from manyhands.cli.shared_arguments import JsonFlag
from manyhands.values.errors import RequestError
from manyhands.values.printable_text import escaped
from manyhands.values.run_folder import RunDir, open_run
from manyhands.values.task_params import params_text

if TYPE_CHECKING:
    from manyhands.stories.remove_runs import RemovableRun

WIDEST = 100
"""Columns of a terminal that a table takes at the most."""

YesFlag = Annotated[bool, typer.Option("--yes", "-y", help="Remove without asking.")]


def runs(
    folders: Annotated[
        list[Path] | None, typer.Argument(metavar="[FOLDER]", help="Where runs are kept: runs/.")
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="FOLDERs are runs: how do they differ?")
    ] = False,
    prune: Annotated[
        bool, typer.Option("--prune", help="Remove runs that ended without a checkpoint.")
    ] = False,
    keep: Annotated[
        int | None, typer.Option(metavar="N", help="With --prune: and all but the newest N.")
    ] = None,
    yes: YesFlag = False,
    json: JsonFlag = False,
) -> None:
    """List the runs under a folder, oldest first; compare some; remove those that nobody needs."""
    if (keep is not None or yes) and not prune:
        raise RequestError("--keep and --yes are for --prune.")
    if compare:
        _compare(folders or [], json)
    elif prune:
        _prune(folders or [Path("runs")], keep, yes, json)
    else:
        for under in folders or [Path("runs")]:
            _list(under, json)


def rm(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs.")],
    yes: YesFlag = False,
) -> None:
    """Remove runs, checkpoints and all, for good. Never one that is going on."""
    from manyhands.stories.remove_runs import removable

    _remove([removable(_found(folder)) for folder in folders], yes)


def _list(under: Path, json: bool) -> None:
    from manyhands.stories.status import list_runs

    found = list_runs(under)
    for row in found:
        row["began"] = time.strftime("%Y-%m-%d %H:%M", time.localtime(row["began"]))
    if json:
        print(to_json(found))
        return
    if not found:
        print(f"no runs under {under}")
        return
    columns = ["run", "state", "step", "scores", "began"]
    columns += ["params"] * any("params" in row for row in found)
    table = Table(*columns, box=None, pad_edge=False)
    for row in found:
        scores = "  ".join(f"{k} {v:.4f}" for k, v in row["scores"].items())
        steps = f"{row['step']}/{row['total_steps']}"
        params = params_text(row.get("params", {}))
        cells = [row["run"], row["state"], steps, scores, row["began"], params]
        table.add_row(*(Text(escaped(cell)) for cell in cells[: len(columns)]))
    Console().print(table)


def _compare(folders: Sequence[Path], json: bool) -> None:
    from manyhands.monitor.run_comparison import look_at, rows

    if len(folders) < 2:
        raise RequestError("--compare: name two runs or more: manyhands runs --compare A B")
    seen = [look_at(open_run(_found(folder))) for folder in folders]
    if json:
        print(to_json({"runs": seen, "differences": rows(seen)}))
        return
    table = Table(box=None, pad_edge=False)
    for name in ("", *(run.run for run in seen)):
        table.add_column(Text(escaped(name), "bold"), overflow="fold")
    for name, row in rows(seen).items():
        table.add_row(*(Text(escaped(cell)) for cell in (name, *row)))
    console = Console()
    console.print(table, width=min(WIDEST, console.width))


def _prune(under: Sequence[Path], keep: int | None, yes: bool, json: bool) -> None:
    from manyhands.stories.remove_runs import prunable

    found = [run for folder in under for run in prunable(folder, keep)]
    if json:
        print(to_json({"would_go" if not yes else "gone": found}))
        if not yes:
            return
    if found:
        _remove(found, yes, quiet=json, only_shown=not sys.stdin.isatty())
    elif not json:
        print("no run is in the way")


def _remove(
    runs: Sequence["RemovableRun"], yes: bool, *, quiet: bool = False, only_shown: bool = False
) -> None:
    """What goes is shown first."""
    from manyhands.stories.remove_runs import remove

    if not quiet:
        for run in runs:
            print(escaped(run.line()))
    if not yes:
        them = "it" if len(runs) == 1 else f"these {len(runs)} runs"
        if only_shown:
            print(f"nothing was removed; --yes removes {them}")
            return
        if not sys.stdin.isatty():
            raise RequestError(f"nobody is here to ask; --yes removes {them}.")
        if not typer.confirm(f"Remove {them} for good?"):
            print("nothing was removed")
            return
    for run in runs:
        remove(Path(run.run))
    if not quiet:
        print(f"removed {len(runs)} run{'s' * (len(runs) != 1)}")


def _found(folder: Path) -> Path:
    """As it is given; or, by its name alone, under runs/."""
    under = Path("runs") / folder
    if not folder.exists() and len(folder.parts) == 1 and RunDir(under).config.exists():
        return under
    return folder
