# SPDX-License-Identifier: Apache-2.0
"""The memory that workers of a host inherit: of the task, and of the shared state.

memfds: they have no name in the file system and vanish with their last holder, so nothing leaks.
"""

import os

from manyhands.values.machine import occupy_standard_files

RESERVED_BYTES = 1 << 46
"""The (sparse) size of a segment; only pages that are written to take memory."""


def create_segments() -> tuple[int, int]:
    """Of the task, and of the state. Never under the numbers of stdin, stdout and stderr, which may
    be free here and are something else in a worker."""
    occupy_standard_files()
    fds = os.memfd_create("manyhands-task"), os.memfd_create("manyhands-state")
    for fd in fds:
        os.ftruncate(fd, RESERVED_BYTES)
    return fds


def blank(fds: tuple[int, int]) -> None:
    """Forget the contents; pages go back to the system."""
    for fd in fds:
        os.ftruncate(fd, 0)
        os.ftruncate(fd, RESERVED_BYTES)
