# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C, SIGTERM and SIGHUP, as wishes that a run stop."""

import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager


@contextmanager
def asked_to_stop() -> Generator[Callable[[], bool]]:
    """Ctrl-C, SIGTERM and SIGHUP ask the run to stop and save; a second one does not wait."""
    asked = threading.Event()

    def ask(number: int, frame: object) -> None:
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()

    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return
    wanted = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    heeded = [s for s in wanted if signal.getsignal(s) is not signal.SIG_IGN]  # nohup stays nohup
    before = {s: signal.signal(s, ask) for s in heeded}
    try:
        yield asked.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
