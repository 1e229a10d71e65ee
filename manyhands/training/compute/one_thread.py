# SPDX-License-Identifier: Apache-2.0
"""Computing with one thread, where bits must not depend on how many there are."""

from collections.abc import Generator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Generator[None]:
    """Several threads would cut a span where vector kernels leave a scalar tail: other bits."""
    threads = torch.get_num_threads()
    if threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
