# SPDX-License-Identifier: Apache-2.0
"""Commands that train."""

import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from manyhands.cli.options_from_requests import options_of
from manyhands.cli.printing import to_json
from manyhands.cli.shared_arguments import JsonFlag, QuietFlag
from manyhands.cli.standard_files import show
from manyhands.stories.end_of_run import EndOfRun
from manyhands.values.errors import RunFailed
from manyhands.values.planned_faults import FaultPlan
from manyhands.values.report import Report
from manyhands.values.run_folder import new_run_path, open_run
from manyhands.values.run_options import ResumeRequest, RunRequest, WhenItEnds, Where
from manyhands.values.shell_commands import command_line

if TYPE_CHECKING:
    from manyhands.stories.train import Attached


@options_of(RunRequest)
def train(
    request: RunRequest,
    context: typer.Context,
    fold: Annotated[
        str | None, typer.Option(metavar="I or all", help="Of data with folds: hold out this one.")
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Train the task that FILE defines."""
    end = _end_of(request, context)
    if fold == "all":
        _train_folds(request, json, end)
        return
    if fold is not None:
        request = request.but(settings=(*request.settings, f"data.fold={fold}"))
    with _started(request, quiet=request.quiet or json) as attached:
        from manyhands.stories.train import train_request

        report = train_request(request.but(quiet=request.quiet or json), attached, end)
    _show_report(report, json, request.quiet)


def _train_folds(request: RunRequest, json: bool, end: EndOfRun) -> None:
    from manyhands.stories.cross_validate import train_folds

    file = Path(str(request.task))
    folder = Path(request.to) if request.to else new_run_path(Path("runs"), f"{file.stem}-folds")
    end.run = folder
    hush = request.quiet or json
    folded = train_folds(request, folder, say=(lambda _: None) if hush else print)
    if json:
        print(to_json(folded))
    elif not request.quiet:
        spread = folded.deviations
        means = "  ".join(f"{k} {v:.4f} ± {spread[k]:.4f}" for k, v in folded.means.items())
        print(f"\nmean    {means}\nruns in {folder}")


@options_of(ResumeRequest)
def resume(request: ResumeRequest, context: typer.Context, json: JsonFlag = False) -> None:
    """Continue RUN from its newest good checkpoint, with any number of workers."""
    end = _end_of(request, context)
    open_run(Path(request.run))
    with _started(request, quiet=request.quiet or json) as attached:
        from manyhands.stories.train import resume_request

        report = resume_request(request.but(quiet=request.quiet or json), attached, end)
    _show_report(report, json, request.quiet)


def demo(
    to: Annotated[Path | None, typer.Option(help="The run folder; else runs/demo-TIME.")] = None,
    workers: Annotated[int, typer.Option(help="How many workers.")] = 2,
    quiet: QuietFlag = False,
) -> None:
    """The whole story on bundled data: digits are learnt, and a worker is killed on the way."""
    file = Path(__file__).parent.parent / "zoo" / "digits.py"
    folder = to or new_run_path(Path("runs"), "demo")
    rough = RunRequest(file, to=folder, workers=workers, quiet=quiet)
    with _started(rough, quiet=quiet) as attached:
        from manyhands.stories.train import train_request

        # kill -9, half-way; rank 1 if there is one
        faults = FaultPlan().kill(rank=min(1, workers - 1), at_step=110, at="update")
        report = train_request(rough, replace(attached, faults=faults))
        _show_report(report, False, quiet)
        if not quiet:
            print("\nThe same again, and nobody is killed:")
        calm = replace(rough, to=folder.with_name(f"{folder.name}-calm"), quiet=True)
        again = train_request(calm, attached)
    if not quiet:
        same = "the same bits" if again.fingerprint == report.fingerprint else "DIFFERENT"
        print(f"fingerprint  {again.fingerprint}  {same}")
        run = Path(report.run)
        print(f"\nNothing lost, nothing twice:  {command_line('ledger', run, '--check')}")
        print(f"Look again:                   {command_line('status', run)}")
    if again.fingerprint != report.fingerprint or report.recoveries != 1:
        raise RunFailed("the demo's two runs differ; please report this.")


def _end_of(request: WhenItEnds, context: typer.Context) -> EndOfRun:
    """--on-end, to be carried out when all is printed."""
    end, after = EndOfRun(request.on_end), context.find_object(list)
    if after is not None:
        after.append(end.carry_out)
    return end


@contextmanager
def _started(where: Where, *, quiet: bool) -> "Generator[Attached]":
    if sys.stderr.isatty() and not quiet:
        print("starting …", file=sys.stderr)
    from manyhands.stories.early_start import started_early

    with started_early(where) as attached:
        yield attached


def _show_report(report: Report, as_json: bool, quiet: bool) -> None:
    if as_json:
        show(to_json(report))
    elif not quiet:
        from manyhands.monitor.terminal import summary

        show(summary(report))
