# SPDX-License-Identifier: Apache-2.0
"""Commands that speak to a run while it goes on, and commands about what it did."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from manyhands.cli.ledgers import print_proof
from manyhands.driver.live.command_socket import (
    Ask,
    Change,
    Continue,
    Examine,
    NobodyThere,
    Pause,
    Scale,
    StopRun,
    ask,
    wait_until_gone,
)
from manyhands.values.config import read_changes
from manyhands.values.errors import RequestError, RunFailed
from manyhands.values.rundir import open_run

if TYPE_CHECKING:
    from manyhands.stories.replay import Replayed

RunFolderArgument = Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder.")]
PatienceOption = Annotated[float, typer.Option("--wait", help="Seconds to wait until it is done.")]


def scale(
    folder: RunFolderArgument,
    workers: Annotated[int, typer.Argument(help="How many workers from now on.")],
    wait: PatienceOption = 60.0,
) -> None:
    """Change the number of workers of RUN while it trains."""
    _say(folder, Scale(workers), wait)


def change(
    folder: RunFolderArgument,
    settings: Annotated[list[str], typer.Argument(help="lr=3e-4 weight_decay=0.1 clip_norm=1 ...")],
    wait: PatienceOption = 60.0,
) -> None:
    """Change settings of RUN while it trains: at one step, on every worker, and journalled."""
    _say(folder, Change(read_changes(settings)), wait)


def pause(folder: RunFolderArgument, wait: PatienceOption = 60.0) -> None:
    """Let RUN rest after its next step; its workers stay."""
    _say(folder, Pause(), wait)


def go_on(folder: RunFolderArgument, wait: PatienceOption = 60.0) -> None:
    """Let a paused RUN go on."""
    _say(folder, Continue(), wait)


def stop(folder: RunFolderArgument, wait: PatienceOption = 600.0) -> None:
    """Stop RUN after its next step and save it; `manyhands resume` goes on later."""
    run = open_run(folder)
    _say(folder, StopRun(), wait)
    if not wait_until_gone(run.control, patience_s=wait):
        raise RequestError(f"the run in {folder} has not ended within {wait:.0f} s; it may still.")


def _say(folder: Path, what: Ask, wait: float) -> None:
    print(ask(open_run(folder).control, what, patience_s=wait))


def ledger(
    folder: RunFolderArgument,
    check: Annotated[
        bool, typer.Option("--check", help="Exit code 1 when it does not prove anything.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Answer in JSON.")] = False,
) -> None:
    """Was every record of every epoch consumed exactly once, and who computed what?"""
    proven = print_proof(open_run(folder), json=json)
    if check and not proven:
        raise typer.Exit(1)


def replay(
    folder: RunFolderArgument,
    step: Annotated[int, typer.Option(help="The first step to compute again, counted from 0.")],
    to: Annotated[int | None, typer.Option(help="Up to here; left out, one step.")] = None,
    workers: Annotated[int, typer.Option(help="How many workers.")] = 1,
    pdb: Annotated[
        int | None,
        typer.Option("--pdb", metavar="MICRO-BATCH", help="Stop in a debugger at this one."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Answer in JSON.")] = False,
) -> None:
    """Compute steps of RUN again, from the nearest checkpoint, and compare every bit."""
    open_run(folder)
    from manyhands.stories import replay

    found = replay.replay(folder, step=step, to=to, workers=workers, debug=pdb)
    _show_replay(found, json)


def audit(
    folder: RunFolderArgument,
    wait: PatienceOption = 120.0,
    workers: Annotated[
        int, typer.Option(help="For a run that is over: how many workers compare.")
    ] = 2,
    json: Annotated[bool, typer.Option("--json", help="Answer in JSON.")] = False,
) -> None:
    """Have workers of RUN compute the same micro-batch and compare every bit.

    If RUN is over, its last steps are computed again by two workers that check each other.
    """
    run = open_run(folder)
    if run.control.exists():
        try:
            _say(folder, Examine(), wait)
            return
        except NobodyThere:
            pass  # the driver was killed and left its socket
    from manyhands.checkpoint.commit import FolderStorage
    from manyhands.stories import replay

    saved = FolderStorage(run).steps()
    if not saved:
        raise RequestError(f"{folder} holds no checkpoint to compare with.")
    first = saved[-2] if len(saved) > 1 else 0
    found = replay.replay(folder, step=first, to=saved[-1], workers=workers, audit=True)
    _show_replay(found, json)


def _show_replay(found: "Replayed", as_json: bool) -> None:
    if as_json:
        answer: dict[str, Any] = {"same": found.same, **msgspec.to_builtins(found)}
        print(msgspec.json.encode(answer).decode())
    else:
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
        raise RunFailed("The replay differs:\n  " + "\n  ".join(shown))
    if not (found.compared_losses or found.compared_weights):
        raise RunFailed("Nothing is left of those steps to compare with.")
    if not as_json:
        count = f"{len(found.compared_losses)} losses, {len(found.compared_weights)} checkpoints"
        print(f"the same, bit for bit ({count} compared)")


def register(app: typer.Typer) -> None:
    for name, verb in (
        ("scale", scale),
        ("set", change),
        ("pause", pause),
        ("continue", go_on),
        ("stop", stop),
        ("ledger", ledger),
        ("replay", replay),
        ("audit", audit),
    ):
        app.command(name)(verb)
