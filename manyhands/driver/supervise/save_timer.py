# SPDX-License-Identifier: Apache-2.0
"""When a run saves by the clock: about every so many seconds, and less often where saving is dear;
and right after a recovery, if a save was lost with somebody who did not live to write its part.

The supervisor looks at the clock, and what it decides is a command that workers agree on as they do
on leaving the loop: all save after the same step. Which step that is changes no bit of any.
"""

import time
from collections.abc import Callable

BLOCKED = 0.01
"""The part of its time for which training may stand still to be saved by the clock, ..."""

WRITING = 0.05
"""... and for which it may be written meanwhile, which takes some of a core and of the disk."""


def interval_s(every_s: float, blocked_s: float, writing_s: float) -> float:
    """How long to wait from save to save, after what the last one took."""
    return max(every_s, blocked_s / BLOCKED, writing_s / WRITING)


def last_due(every_steps: int | None, step: int) -> int:
    """The step up to this one after which a run was to be saved; 0: none."""
    return step // every_steps * every_steps if every_steps else 0


class SaveTimer:
    def __init__(
        self, every_s: Callable[[], float], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`every_s` is the setting in force; 0: never."""
        self.every_s, self.clock = every_s, clock
        self.since = clock()
        """The last save, or the last time that one was asked for: it may have come to nothing."""
        self.blocked_s = self.writing_s = 0.0
        self.pending = False
        """One was asked for and is not on disk."""
        self._owed = False

    def due(self) -> bool:
        """Whether it is time to ask for one; then the answer is no again for a while."""
        every, now = self.every_s(), self.clock()
        if self._owed:
            self._owed, self.since, self.pending = False, now, True
            return True
        if not every or now - self.since < interval_s(every, self.blocked_s, self.writing_s):
            return False
        self.since, self.pending = now, True
        return True

    def recovered(self, every_steps: int | None, saved: int, step: int) -> None:
        """After a loss training goes on after `step` steps, and the newest on disk is `saved`. What
        is due after this very step is saved as the view begins."""
        self._owed = self.pending or max(0, saved) < last_due(every_steps, step) < step

    def saved(self, blocked_s: float, writing_s: float) -> None:
        """A step is on disk, for whatever reason it was saved."""
        self.since, self.blocked_s, self.writing_s = self.clock(), blocked_s, writing_s
        self.pending = self._owed = False
