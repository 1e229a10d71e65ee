# SPDX-License-Identifier: Apache-2.0
"""Arguments that several commands have, and that are no field of a request."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

Afterwards = Callable[[int], None]
"""What a command leaves, in its context's `obj`, to be done with the exit code when all is said."""

RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder.")]
Step = Annotated[int | None, typer.Option(help="A saved step; left out, the newest one.")]
WhichWeights = Annotated[
    str,
    typer.Option("--weights", metavar="trained, ema or swa", help="Those, or an average of them."),
]
WaitOption = Annotated[float, typer.Option("--wait", help="Seconds to wait until it is done.")]
QuietFlag = Annotated[bool, typer.Option("--quiet", "-q", help="Print warnings and errors only.")]
JsonFlag = Annotated[bool, typer.Option("--json", help="Answer in JSON.")]
