# SPDX-License-Identifier: Apache-2.0
"""A worker is one process. What user code forks, and forgets to end, is not the worker.

Such a child comes back from the user's code with all that the worker has, shared memory and
connections, and would go on training in its place. It ends where it comes back.
"""

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def one_process() -> Generator[None]:
    """Around calls of user code."""
    mine = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != mine:
            told = "a process that your code forked came back from it, and was ended: os._exit it"
            os.write(sys.stderr.fileno() if sys.stderr else 2, f"manyhands: {told}\n".encode())
            os._exit(0)
