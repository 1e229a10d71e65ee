# SPDX-License-Identifier: Apache-2.0
"""Where a worker notes what it is at, in memory that outlives it: half a microsecond a note.

The host agent makes it before the fork and reads it when the worker has ended, however that came:
nobody else can tell which micro-batch crashed a process.
"""

import mmap
import struct

from manyhands.values.work_in_hand import KINDS, Kind, WorkInHand

_FORM = struct.Struct("<qqq")


class WorkMark:
    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _FORM.size)  # anonymous and shared: children write to it

    def note(self, kind: Kind, step: int, index: int) -> None:
        _FORM.pack_into(self._memory, 0, KINDS.index(kind), step, index)

    def read(self) -> WorkInHand | None:
        """None: who wrote over it, as it may write over any of its memory, left no sense in it."""
        kind, step, index = _FORM.unpack_from(self._memory)
        if not (0 <= kind < len(KINDS) and 0 <= step < 1 << 53 and -1 <= index < 1 << 53):
            return None
        return WorkInHand(KINDS[kind], step, index)

    def close(self) -> None:
        self._memory.close()
