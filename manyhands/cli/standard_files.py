# SPDX-License-Identifier: Apache-2.0
"""stdin, stdout and stderr, whatever the command was given in their place.

A number that was closed would be the next file's that is opened, and what is printed would end up
in it; and a terminal that cannot show a character is no reason for a command to fail.
"""

import io
import os
import sys
from contextlib import suppress

from manyhands.values.machine import occupy_standard_files


def whole_standard_files() -> None:
    occupy_standard_files()
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # it was closed when Python started
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (as long as we live)
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def show(text: str) -> None:
    """Print what the command was for; whether anybody reads it does not change how it ended."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is still buffered goes there
