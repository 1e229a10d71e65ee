# SPDX-License-Identifier: Apache-2.0
"""Commands that speak to a run while it goes on."""

from typing import Annotated

import typer

from manyhands.cli.run_commands import show_replay
from manyhands.cli.shared_arguments import JsonFlag, RunFolder, WaitOption
from manyhands.stories import live


def scale(
    folder: RunFolder,
    workers: Annotated[
        int | None, typer.Argument(help="How many workers from now on; left out: as many as now.")
    ] = None,
    servers: Annotated[
        int | None, typer.Option(help="How many servers, where servers update the weights.")
    ] = None,
    wait: WaitOption = 60.0,
) -> None:
    """Change the number of workers, or of servers, of RUN while it trains."""
    print(live.scale(folder, workers, wait, servers=servers))


def change(
    folder: RunFolder,
    settings: Annotated[list[str], typer.Argument(help="lr=3e-4 weight_decay=0.1 clip_norm=1 ...")],
    wait: WaitOption = 60.0,
) -> None:
    """Change settings of RUN while it trains: at one step, on every worker, and journalled."""
    print(live.change(folder, settings, wait))


def pause(folder: RunFolder, wait: WaitOption = 60.0) -> None:
    """Let RUN rest after its next step; its workers stay."""
    print(live.pause(folder, wait))


def go_on(folder: RunFolder, wait: WaitOption = 60.0) -> None:
    """Let a paused RUN go on."""
    print(live.go_on(folder, wait))


def stop(folder: RunFolder, wait: WaitOption = 600.0) -> None:
    """Stop RUN after its next step and save it; `manyhands resume` goes on later."""
    print(live.stop(folder, wait))
    live.wait_for_the_end(folder, wait)


def audit(
    folder: RunFolder,
    wait: WaitOption = 120.0,
    workers: Annotated[
        int, typer.Option(help="For a run that is over: how many workers compare.")
    ] = 2,
    json: JsonFlag = False,
) -> None:
    """Have workers of RUN compute the same micro-batch and compare every bit.

    If RUN is over, its last steps are computed again by two workers that check each other.
    """
    if (answer := live.audit(folder, wait)) is not None:
        print(answer)
        return
    from manyhands.stories.replay import replay_last_steps

    show_replay(replay_last_steps(folder, workers=workers), as_json=json)
