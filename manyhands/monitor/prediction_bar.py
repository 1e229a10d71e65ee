# SPDX-License-Identifier: Apache-2.0
"""How far predicting is: a bar, where it takes more than a moment and somebody watches."""

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress

AFTER_S = 2.0

PartsDone = Callable[[], None]
"""To be called when a part is done."""


@contextmanager
def prediction_bar(sizes: Sequence[int], *, quiet: bool) -> Generator[PartsDone]:
    """`sizes`: of the parts, in whichever unit."""
    console = Console(stderr=True)
    bar = Progress(console=console, disable=quiet or not console.is_terminal)
    task = bar.add_task("predict", total=sum(sizes))
    left = iter(sizes)
    late = threading.Timer(AFTER_S, bar.start)
    late.daemon = True
    late.start()
    try:
        yield lambda: bar.advance(task, next(left, 0))
    finally:
        late.cancel()
        late.join()
        bar.stop()
