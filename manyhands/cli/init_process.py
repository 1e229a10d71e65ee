# SPDX-License-Identifier: Apache-2.0
"""As process 1 of a container, a command is its own init.

Process 1 inherits every orphan, and reaps it or nobody does; and a signal that it has no handler
for is ignored. So the command goes on in a child, and what stays behind does these two things and
nothing else.
"""

import os
import signal
import sys

_PASSED_ON = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)

_SI_KERNEL = 0x80
"""Sent by the terminal, to the whole foreground group: the command has had it already."""


def init_stays_behind() -> None:
    """Return in a child. Process 1 itself passes signals on, reaps, and ends as the child did."""
    waited = {signal.SIGCHLD, *_PASSED_ON}
    signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    command = os.fork()
    if command == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, waited)
        return
    while True:
        seen = signal.sigwaitinfo(waited)
        if seen.si_signo == signal.SIGCHLD:
            code = _reap(command)
            if code is not None:
                sys.stdout.flush()
                os._exit(code if code >= 0 else 128 - code)
        elif seen.si_code != _SI_KERNEL:
            os.kill(command, seen.si_signo)


def _reap(command: int) -> int | None:
    """Everybody who has ended; the exit code of the command, when it is among them."""
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == command:
            return os.waitstatus_to_exitcode(status)
        if pid == 0:
            return None
