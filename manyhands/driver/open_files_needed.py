# SPDX-License-Identifier: Apache-2.0
"""Enough file descriptors for a run, or a refusal that names the limit: not hours later."""

from manyhands.values.errors import RequestError
from manyhands.values.machine import allow_open_files, open_files

DRIVER = 40
"""The run's own files and sockets, and those that come and go: a checkpoint, somebody who asks."""

EACH_WORKER = 3
"""Its connection to the supervisor, and a file that is carried for it."""


def needed(workers: int, already: int) -> int:
    return already + DRIVER + EACH_WORKER * workers


def refuse_few_open_files(workers: int) -> None:
    wanted, most = needed(workers, open_files()), allow_open_files()
    if most < wanted:
        raise RequestError(
            f"this process may have {most} files open (ulimit -n), and a run of {workers} "
            f"worker{'s' * (workers != 1)} needs about {wanted}. Raise the limit: ulimit -n 65536"
        )
