# SPDX-License-Identifier: Apache-2.0
"""How many pieces of something long are on their way at a time: control goes before bulk.

Pieces share a connection with what must not wait for them: pings, commands, heartbeats. So only as
much is asked for (or sent, unanswered) as makes others wait about QUEUE_S, on whatever link it is
(and for a moment twice that, until it is noticed): many pieces where it is fast or far, two where
it is slow.
"""

from collections import deque

QUEUE_S = 0.25
LEAST, MOST = 2, 128


def next_window(window: int, took_s: float, least_s: float) -> int:
    """After a piece that took so long; the quickest so far took `least_s`. What took longer than
    that has stood in a queue, behind other pieces."""
    if took_s - least_s > QUEUE_S:
        return max(LEAST, window // 2)
    return min(MOST, window + 1)


class BulkWindow:
    """Of pieces that come, or are answered, in the order in which they were asked for."""

    def __init__(self) -> None:
        self.size = LEAST
        self._since: deque[float] = deque()
        self._least_s = float("inf")

    @property
    def open(self) -> bool:
        return len(self._since) < self.size

    def asked(self, now: float) -> None:
        self._since.append(now)

    def give_up(self, before: float) -> None:
        """What was asked for before then will not come."""
        while self._since and self._since[0] < before:
            self._since.popleft()
            self.size = LEAST

    def came(self, now: float) -> None:
        if not self._since:
            return  # it was given up
        took_s = now - self._since.popleft()
        self._least_s = min(self._least_s, took_s)
        self.size = next_window(self.size, took_s, self._least_s)
