# SPDX-License-Identifier: Apache-2.0
"""Commands that people are told to type: quoted, so that a shell reads them as they are meant."""

import shlex
from pathlib import Path


def command_line(*words: str | Path) -> str:
    """`manyhands` and these words. A path that looks like an option gets a ./ before it."""
    shown = [f"./{w}" if isinstance(w, Path) and str(w).startswith("-") else str(w) for w in words]
    return shlex.join(["manyhands", *shown])
