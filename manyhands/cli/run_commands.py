# SPDX-License-Identifier: Apache-2.0
"""Commands about what a run is doing, and about what it did."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from manyhands.cli.options_from_requests import options_of
from manyhands.cli.printing import (
    links_table,
    servers_table,
    show_pairs,
    steps_behind,
    to_json,
    warnings_shown,
)
from manyhands.cli.shared_arguments import JsonFlag, RunFolder, Step, WhichWeights
from manyhands.monitor.ledger_page import print_proof
from manyhands.values.errors import ManyhandsError, RunFailed
from manyhands.values.run_folder import open_run
from manyhands.values.run_options import EvaluateRequest
from manyhands.values.task_params import params_text
from manyhands.values.user_frames import user_traceback

if TYPE_CHECKING:
    from manyhands.stories.replay import Replayed


@options_of(EvaluateRequest)
def evaluate(request: EvaluateRequest, json: JsonFlag = False) -> None:
    """Score a saved step of RUN on the held-out records."""
    open_run(Path(request.run))
    from manyhands.stories.evaluate import evaluate_request

    with warnings_shown():
        try:
            scores = evaluate_request(request)
        except (ManyhandsError, OSError):
            raise
        except Exception as error:
            raise RunFailed(f"evaluating failed.\n{user_traceback(error)}") from error
    show_pairs(scores, as_json=json)


def fingerprint(
    folder: RunFolder, step: Step = None, weights: WhichWeights = "trained", json: JsonFlag = False
) -> None:
    """Print the SHA-256 of a saved step's weights and buffers."""
    open_run(folder)
    from manyhands.stories import evaluate

    with warnings_shown():
        mark = evaluate.fingerprint(folder, step=step, weights=weights)
    print(to_json({"fingerprint": mark}) if json else mark)


def status(folder: RunFolder, json: JsonFlag = False) -> None:
    """What RUN is doing: state, step, speed, and every worker."""
    from manyhands.stories.status import status as status_of

    found = status_of(folder)
    if json:
        print(to_json(found))
        return
    workers: Any = found.pop("workers")
    links: Any = found.pop("links", [])
    servers: Any = found.pop("servers", [])
    behind: Any = found.pop("staleness_counts", [])
    found.pop("hosts", None)  # manyhands hosts shows them
    hidden = ("pid", "host", "time", "run", "seconds_ago", "verdict")
    shown = {k: v for k, v in found.items() if k not in hidden}
    if "params" in shown:
        shown["params"] = params_text(shown["params"])
    if any(behind):
        shown["steps behind"] = steps_behind(behind)
    shown["saved"] = ", ".join(str(s) for s in found["saved"]) or "nothing yet"
    damaged = shown.pop("damaged")
    show_pairs(shown)
    for problem in damaged:
        print(f"damaged  {problem}")
    if workers:
        columns = ("rank", "worker", "pid", "host", "step", "micro-batches", "samples/s")
        table = Table(*columns, box=None, pad_edge=False)
        for w in workers:
            work = "serves" if w.get("serves") else w["micro_batches"]
            numbers = (w["rank"], w["worker"], w["pid"], w["host"], w["step"], work)
            table.add_row(*(str(n) for n in numbers), f"{w['samples_per_s']:.1f}")
        Console().print(table)
    if servers:
        print("\nservers, in the last seconds:")
        Console().print(servers_table(servers))
    if links:
        print()
        Console().print(links_table(links))
    if "verdict" in found:
        print(f"\n{found['verdict']}")


def ledger(
    folder: RunFolder,
    check: Annotated[
        bool, typer.Option("--check", help="Exit code 1 when it does not prove anything.")
    ] = False,
    json: JsonFlag = False,
) -> None:
    """Was every record of every epoch consumed exactly once, and who computed what?"""
    proven = print_proof(open_run(folder), json=json)
    if check and not proven:
        raise typer.Exit(1)


def replay(
    folder: RunFolder,
    step: Annotated[int, typer.Option(help="The first step to compute again, counted from 0.")],
    to: Annotated[int | None, typer.Option(help="Up to here; left out, one step.")] = None,
    workers: Annotated[int, typer.Option(help="How many workers.")] = 1,
    pdb: Annotated[
        int | None,
        typer.Option("--pdb", metavar="MICRO-BATCH", help="Stop in a debugger at this one."),
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Compute steps of RUN again, from the nearest checkpoint, and compare every bit."""
    open_run(folder)
    from manyhands.stories import replay

    found = replay.replay(folder, step=step, to=to, workers=workers, debug=pdb)
    show_replay(found, as_json=json)


def show_replay(found: "Replayed", *, as_json: bool) -> None:
    if as_json:
        answer: dict[str, Any] = {"same": found.same, **msgspec.to_builtins(found)}
        print(to_json(answer))
    else:
        for problem in found.passed_over:
            print(f"warning: {problem}; begun at step {found.first} instead", file=sys.stderr)
        print(f"computed steps {found.first} to {found.to - 1} again")
        for step, loss in sorted(found.losses.items())[-10:]:
            mark = "the same bits" if step in found.compared_losses else "not known from then"
            different = any(d.startswith(f"step {step}: the loss") for d in found.differences)
            print(f"  after step {step:<8} loss {loss:.8f}   {'DIFFERENT' if different else mark}")
        for step in found.compared_weights:
            print(f"  weights after step {step}: compared with the checkpoint")
        print(f"  fingerprint {found.fingerprint}")
    if found.differences:
        shown = found.differences[:10]
        more = len(found.differences) - len(shown)
        shown += [f"... and {more} more"] * bool(more)
        why = f"\n{found.otherwise[0].upper()}{found.otherwise[1:]}." if found.otherwise else ""
        raise RunFailed("The replay differs:\n  " + "\n  ".join(shown) + why)
    if found.damaged:
        raise RunFailed("There is nothing to compare with:\n  " + "\n  ".join(found.damaged))
    if not (found.compared_losses or found.compared_weights):
        raise RunFailed("Nothing is left of those steps to compare with.")
    if not as_json:
        count = f"{len(found.compared_losses)} losses, {len(found.compared_weights)} checkpoints"
        print(f"the same, bit for bit ({count} compared)")
