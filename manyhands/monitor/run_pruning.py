# SPDX-License-Identifier: Apache-2.0
"""Which runs may go: pure."""

from collections.abc import Sequence

import msgspec

ENDED = ("finished", "stopped", "failed", "died", "unknown", "starting")
"""States in which nobody is at work, where the folder is not in use."""


class PrunableRun(msgspec.Struct, frozen=True):
    run: str
    state: str
    in_use: bool
    saved: int
    """How many checkpoints it has."""


def to_prune(runs: Sequence[PrunableRun], keep: int | None) -> dict[str, str]:
    """Run → why it goes. `runs` are oldest first.

    What ended without a checkpoint goes: nothing can be resumed or read from it. With `keep`, so do
    all but the newest so many of the others. What is in use stays, and is not counted.
    """
    ended = [run for run in runs if not run.in_use and run.state in ENDED]
    empty = {run.run: f"{run.state}, and nothing was saved" for run in ended if not run.saved}
    if keep is None:
        return empty
    whole = [run for run in ended if run.saved]
    older = whole[: max(0, len(whole) - keep)]
    return empty | {run.run: f"older than the newest {keep}" for run in older}
