# SPDX-License-Identifier: Apache-2.0
"""Every command. Heavy modules are imported inside: `--help` and `status` answer at once."""

import gc
import sys
import threading
import time
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from manyhands.cli import datasets, live
from manyhands.cli import hosts as hosts_commands
from manyhands.cli.hosts import (
    Hosts,
    Listen,
    RayTokenFile,
    Ship,
    Spread,
    Ssh,
    TokenFile,
    WorkerResources,
)
from manyhands.values.errors import ManyhandsError, RequestError, RunFailed
from manyhands.values.rundir import RunDir, new_run_path, open_run, runs_under
from manyhands.values.task import user_traceback
from manyhands.values.version import VERSION

if TYPE_CHECKING:
    from manyhands.launch.engines.launcher import Launcher
    from manyhands.launch.hosts.requested_hosts import Wish
    from manyhands.values.report import Report

app = typer.Typer(
    name="manyhands",
    help="Many hands, one result: distributed training whose weights do not depend on who did it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

TaskFile = Annotated[
    Path, typer.Argument(metavar="FILE", help="Python that defines `task`, or TOML that names it.")
]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder.")]
Workers = Annotated[
    str | None,
    typer.Option(
        metavar="N or MIN:MAX",
        help="How many workers; 2:8 grows and shrinks with what is there. "
        "Left out: cores, or fewer if less to do.",
    ),
]
SamplesPerSecond = Annotated[
    float | None,
    typer.Option(metavar="SPEED", help="As many workers, within --workers, as that takes."),
]
FinishBy = Annotated[
    str | None,
    typer.Option(metavar="18:30, 2h or DATE", help="... as it takes to be done by then."),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="section.key=value", help="Change a setting. Repeatable."),
]
QuietFlag = Annotated[bool, typer.Option("--quiet", "-q", help="Print warnings and errors only.")]
JsonFlag = Annotated[bool, typer.Option("--json", help="Answer in JSON.")]
Engine = Annotated[
    str,
    typer.Option(
        metavar="local, inline, ray or ray://HOST:PORT",
        help="Processes of this host; one worker in this process; a Ray of our own, or a cluster.",
    ),
]
Step = Annotated[int | None, typer.Option(help="A saved step; left out, the newest good one.")]


datasets.register(app)
hosts_commands.register(app)
live.register(app)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        print(f"manyhands {VERSION}")
        raise typer.Exit


@app.command()
def train(
    file: TaskFile,
    to: Annotated[Path | None, typer.Option(help="The run folder; else runs/NAME-TIME.")] = None,
    workers: Workers = None,
    samples_per_second: SamplesPerSecond = None,
    finish_by: FinishBy = None,
    fold: Annotated[
        str | None, typer.Option(metavar="I or all", help="Of data with folds: hold out this one.")
    ] = None,
    set: Set = None,
    quiet: QuietFlag = False,
    engine: Engine = "local",
    hosts: Hosts = None,
    listen: Listen = None,
    token_file: TokenFile = None,
    ssh: Ssh = None,
    spread: Spread = False,
    worker_resources: WorkerResources = None,
    ray_token_file: RayTokenFile = None,
    ship: Ship = None,
    json: JsonFlag = False,
) -> None:
    """Train the task that FILE defines."""
    if fold == "all":
        if samples_per_second is not None or finish_by is not None:
            raise RequestError("--fold all trains several runs: it takes no wished speed or time.")
        _train_folds(file, to, workers, set or [], quiet, json)
        return
    if fold is not None:
        set = [*(set or []), f"data.fold={fold}"]
    wish = _wish(
        hosts, listen, token_file, ssh, spread, worker_resources, ray_token_file, tuple(ship or ())
    )
    with _started_early(engine, quiet or json, wish) as launcher:
        report = _run().train(
            file,
            to=to,
            workers=workers,
            samples_per_second=samples_per_second,
            finish_by=finish_by,
            settings=set or [],
            quiet=quiet or json,
            launcher=launcher,
        )
    _show_report(report, json, quiet)


def _train_folds(
    file: Path, to: Path | None, workers: str | None, set: list[str], quiet: bool, json: bool
) -> None:
    from manyhands.stories.cross_validate import train_folds

    if workers is not None and not workers.isdigit():
        raise RequestError("--fold all needs a plain number of workers for each fold.")
    folder = to or new_run_path(Path("runs"), f"{file.stem}-folds")
    each = None if workers is None else int(workers)
    hush = quiet or json
    folded = train_folds(
        file, folder, workers=each, settings=set, say=(lambda _: None) if hush else print
    )
    if json:
        print(_json(folded))
    elif not quiet:
        spread = folded.deviations
        means = "  ".join(f"{k} {v:.4f} ± {spread[k]:.4f}" for k, v in folded.means.items())
        print(f"\nmean    {means}\nruns in {folder}")


@app.command()
def resume(
    folder: RunFolder,
    workers: Workers = None,
    samples_per_second: SamplesPerSecond = None,
    finish_by: FinishBy = None,
    set: Set = None,
    quiet: QuietFlag = False,
    engine: Engine = "local",
    hosts: Hosts = None,
    listen: Listen = None,
    token_file: TokenFile = None,
    ssh: Ssh = None,
    spread: Spread = False,
    worker_resources: WorkerResources = None,
    ray_token_file: RayTokenFile = None,
    ship: Ship = None,
    json: JsonFlag = False,
) -> None:
    """Continue RUN from its newest good checkpoint, with any number of workers."""
    open_run(folder)
    wish = _wish(
        hosts, listen, token_file, ssh, spread, worker_resources, ray_token_file, tuple(ship or ())
    )
    with _started_early(engine, quiet or json, wish) as launcher:
        report = _run().resume(
            folder,
            workers=workers,
            samples_per_second=samples_per_second,
            finish_by=finish_by,
            settings=set or [],
            quiet=quiet or json,
            launcher=launcher,
        )
    _show_report(report, json, quiet)


@app.command()
def demo(
    to: Annotated[Path | None, typer.Option(help="The run folder; else runs/demo-TIME.")] = None,
    workers: Annotated[int, typer.Option(help="How many workers.")] = 2,
    quiet: QuietFlag = False,
) -> None:
    """The whole story on bundled data: digits are learnt, and a worker is killed on the way."""
    file = Path(__file__).parent.parent / "zoo" / "digits.py"
    folder = to or new_run_path(Path("runs"), "demo")
    with _started_early("local", quiet) as launcher:
        run = _run()
        from manyhands.values.faults import FaultPlan

        # kill -9, half-way; rank 1 if there is one
        faults = FaultPlan().kill(rank=min(1, workers - 1), at_step=110, at="update")
        report = run.train(
            file, to=folder, workers=workers, quiet=quiet, launcher=launcher, faults=faults
        )
        _show_report(report, False, quiet)
        if not quiet:
            print("\nThe same again, and nobody is killed:")
        calm = folder.with_name(f"{folder.name}-calm")
        again = run.train(file, to=calm, workers=workers, quiet=True, launcher=launcher)
    if not quiet:
        same = "the same bits" if again.fingerprint == report.fingerprint else "DIFFERENT"
        print(f"fingerprint  {again.fingerprint}  {same}")
        print(f"\nNothing lost, nothing twice:  manyhands ledger {report.run} --check")
        print(f"Look again:                   manyhands status {report.run}")
    if again.fingerprint != report.fingerprint or report.recoveries != 1:
        raise RunFailed("the demo's two runs differ; please report this.")


@app.command()
def evaluate(
    folder: RunFolder,
    step: Step = None,
    engine: Annotated[
        str,
        typer.Option(metavar="local, ray or ray://HOST:PORT", help="Here, or by tasks of Ray."),
    ] = "local",
    worker_resources: WorkerResources = None,
    ray_token_file: RayTokenFile = None,
    json: JsonFlag = False,
) -> None:
    """Score a saved step of RUN on the held-out records."""
    open_run(folder)
    from manyhands.stories import evaluate

    with _warnings_shown():
        try:
            scores = evaluate.evaluate(
                folder,
                step=step,
                engine=engine,
                worker_resources=worker_resources,
                ray_token_file=ray_token_file,
            )
        except (ManyhandsError, OSError):
            raise
        except Exception as error:
            raise RunFailed(f"evaluating failed.\n{user_traceback(error)}") from error
    _show_pairs(scores, json)


@app.command()
def fingerprint(folder: RunFolder, step: Step = None, json: JsonFlag = False) -> None:
    """Print the SHA-256 of a saved step's weights and buffers."""
    open_run(folder)
    from manyhands.stories import evaluate

    with _warnings_shown():
        mark = evaluate.fingerprint(folder, step=step)
    print(_json({"fingerprint": mark}) if json else mark)


@app.command()
def status(folder: RunFolder, json: JsonFlag = False) -> None:
    """What RUN is doing: state, step, speed, and every worker."""
    from manyhands.checkpoint.commit import FolderStorage
    from manyhands.monitor.run_status import status as status_of

    run = open_run(folder)
    found: dict[str, Any] = {**status_of(run), "saved": FolderStorage(run).steps()}
    if json:
        print(_json(found))
        return
    workers: Any = found.pop("workers")
    links: Any = found.pop("links", [])
    hidden = ("pid", "host", "time", "run", "seconds_ago", "verdict")
    shown = {k: v for k, v in found.items() if k not in hidden}
    shown["saved"] = ", ".join(str(s) for s in found["saved"]) or "nothing yet"
    _show_pairs(shown, False)
    if workers:
        columns = ("rank", "worker", "pid", "host", "step", "micro-batches", "samples/s")
        table = Table(*columns, box=None, pad_edge=False)
        for w in workers:
            numbers = (w["rank"], w["worker"], w["pid"], w["host"], w["step"], w["micro_batches"])
            table.add_row(*(str(n) for n in numbers), f"{w['samples_per_s']:.1f}")
        Console().print(table)
    if links:
        print()
        Console().print(hosts_commands.links_table(links))
    if "verdict" in found:
        print(f"\n{found['verdict']}")


@app.command()
def runs(
    under: Annotated[Path, typer.Argument(help="Where runs are kept.")] = Path("runs"),
    json: JsonFlag = False,
) -> None:
    """List the runs under a folder, oldest first."""
    from manyhands.monitor.run_status import status as status_of

    found = [_row(run, status_of(run)) for run in runs_under(under)]
    if json:
        print(_json(found))
        return
    if not found:
        print(f"no runs under {under}")
        return
    table = Table("run", "state", "step", "scores", "began", box=None, pad_edge=False)
    for row in found:
        scores = "  ".join(f"{k} {v:.4f}" for k, v in row["scores"].items())
        steps = f"{row['step']}/{row['total_steps']}"
        table.add_row(row["run"], row["state"], steps, scores, row["began"])
    Console().print(table)


def _row(run: RunDir, status: dict[str, Any]) -> dict[str, Any]:
    began = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.config.stat().st_ctime))
    keys = ("run", "state", "step", "total_steps")
    return {k: status[k] for k in keys} | {"scores": status.get("scores", {}), "began": began}


@contextmanager
def _started_early(engine: str, quiet: bool, wish: "Wish | None" = None) -> "Generator[Launcher]":
    """Start the host agent before importing torch here, so that both import it side by side.

    Ray is waited for, so there torch is imported by a thread meanwhile.
    """
    if sys.stderr.isatty() and not quiet:
        print("starting …", file=sys.stderr)
    from manyhands.launch.choose_engine import open_engine
    from manyhands.launch.ray.ray_session import is_ray

    if is_ray(engine):
        threading.Thread(target=_run, name="import torch", daemon=True).start()
    launcher = open_engine(engine, wish)
    try:
        yield launcher
    finally:
        launcher.close()


def _wish(
    hosts: str | None, listen: str | None, token_file: Path | None, ssh: str | None, *rest: Any
) -> "Wish":
    from manyhands.launch.hosts.requested_hosts import SSH, Wish

    return Wish(hosts, listen, token_file, ssh or SSH, *rest)


@contextmanager
def _warnings_shown() -> "Generator[None]":
    """Python's warnings as lines for people."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        print(f"warning: {warning.message}", file=sys.stderr)


def _run() -> Any:
    """The driver. Importing torch makes a million objects; looking for garbage costs 0.4 s."""
    gc.disable()
    from manyhands.stories import train

    gc.freeze()
    gc.enable()
    return train


def _show_report(report: "Report", as_json: bool, quiet: bool) -> None:
    if as_json:
        print(_json(report))
    elif not quiet:
        from manyhands.monitor.terminal import summary

        print(summary(report))


def _show_pairs(pairs: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(_json(pairs))
        return
    width = max(len(name) for name in pairs)
    for name, value in pairs.items():
        text = f"{value:.4f}" if isinstance(value, float) else str(value)
        print(f"{name:<{width}}  {text}")


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()  # NaN becomes null, as JSON wants it
