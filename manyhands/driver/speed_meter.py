# SPDX-License-Identifier: Apache-2.0
"""How fast a run is, from what its leader says."""

import time


class SpeedMeter:
    """Records a second, of all workers together."""

    def __init__(self) -> None:
        self.lately = 0.0
        self.first_at: float | None = None
        """When the first step was heard of: what came before was start-up, not training."""
        self._first = self._last = (0.0, 0)

    def measure(self, records: int) -> None:
        """`records` were trained on until now."""
        now = time.time()
        if self.first_at is None:
            self.first_at = now
            self._first = self._last = (now, records)
        then, before = self._last
        if records > before and now > then:
            speed = (records - before) / (now - then)
            self.lately = speed if not self.lately else 0.8 * self.lately + 0.2 * speed
            self._last = (now, records)

    def mean(self) -> float:
        """Since the first step."""
        (then, before), (now, records) = self._first, self._last
        return (records - before) / (now - then) if now > then else self.lately
